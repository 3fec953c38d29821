"""Decode steps in graphs: two per (sequences, rows of each), where a number of sequences is padded to a bucket.

1. `pad` fills a step up with sequences of the padding slot, on the host.
2. `run` copies the step's slots to where the graph finds them, replays it, and gives logits and positions of all rows.
3. Sampling runs between the graphs: few steps sample alike.
4. `accept` replays the second graph with the sampled tokens, where a step has one: a part behind sampling that is more
   than Slots.accept, such as the MTP layer (engine/drafts).
5. `capture` made the graphs, the largest first, so that the others find room in its memory.

Everything else that a graph reads is the state of the slots on the device (engine/step/slots.py). The padding slot has
length 0 and capacity 0, so the KV of its rows goes to the null page; `num_rows` keeps them away from the experts, and
no result is taken from them. Rows are independent, so padding changes nothing. Data-parallel replicas replay the same
bucket, idle ones with padding alone, because the experts' exchange has one shape for all.

On a CPU the replay is the call that would have been captured: the same padding and the same memory, without the speed.
"""

import contextlib
import dataclasses
import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from millrace_serve.engine.step.batch import HostBatch, StepBatch
from millrace_serve.engine.step.device import Device, Replay
from millrace_serve.engine.step.slots import Accepted, Slots
from millrace_serve.model.inputs import ForwardInput

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
BUCKET_STEP = 64  # beyond the last of them
WARMUPS = 2  # runs before a capture: what libraries set up in a first run cannot be captured

Forward = Callable[[ForwardInput], tuple[Tensor, Tensor]]  # -> hidden states [T, D], logits float32 [T, V]
# A step, its inputs, its hidden states [T, D], and int64 [R], what its rows sampled.
Accept = Callable[[StepBatch[Tensor], ForwardInput, Tensor, Tensor], Accepted]


class Key(NamedTuple):
    bucket: int  # sequences
    num_queries: int  # rows of each


def buckets_up_to(max_running: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """The last one is max_running, so every step of decode sequences has a bucket."""
    return bounded(wanted or with_steps(BUCKETS, BUCKET_STEP, max_running), max_running)


def with_steps(buckets: Sequence[int], step: int, most: int) -> tuple[int, ...]:
    """`buckets`, and behind them one each `step` below `most`."""
    return (*buckets, *range(buckets[-1] + step, most, step))


def bounded(buckets: Sequence[int], most: int) -> tuple[int, ...]:
    """Ascending; `most` is the last one."""
    return (*sorted({size for size in buckets if size < most}), most)


class DecodeGraphs:
    """The graphs of one rank, used only by the thread that launches steps."""

    def __init__(
        self,
        device: Device,
        forward: Callable[[int], Forward],
        slots: Slots,
        buckets: Sequence[int],
        dp: int = 1,
        accept: Accept | None = None,
        num_queries: Callable[[int], int] = lambda sequences: 1,
    ) -> None:
        """
        Args:
            forward: what is captured for a bucket
            accept: captured as the second graph of each step; None: there is none
            num_queries: of a step of so many sequences (Limits.num_queries); above 1 only with `accept`
        """
        self._device, self._forward, self._state, self._dp = device, forward, slots, dp
        self._accept = accept
        self.buckets = tuple(buckets)
        self._keys = graph_keys(self.buckets, num_queries)
        largest, rows, where = self.buckets[-1], max(key.bucket * key.num_queries for key in self._keys), device.torch
        self._slots = torch.full((largest,), slots.padding, device=where)
        self._num_rows = torch.zeros(1, dtype=torch.int32, device=where)
        self._tokens = torch.zeros(rows, dtype=torch.int64, device=where)  # sampled
        # Kept here and not by what is captured: a graph holds addresses, and no memory of theirs outside its own pool.
        self._sample_rows = torch.arange(rows, device=where)
        self._results: dict[str, Tensor] = {}
        self._replays: dict[Key, tuple[Replay, Replay | None]] = {}

    def holds(self, batch: HostBatch) -> bool:
        """Whether the step can be a graph, here and on every other replica."""
        if not batch.all_decode or self._sequences(batch) > self.buckets[-1]:
            return False
        return Key(self._bucket(batch), batch.num_queries) in self._replays

    def pad(self, batch: HostBatch) -> HostBatch:
        """`batch` with the slots of its bucket; there may be none in it."""
        slots = np.full(self._bucket(batch), self._state.padding)
        slots[: batch.num_decode] = batch.slots
        return dataclasses.replace(batch, slots=slots)

    def run(self, step: StepBatch[Tensor]) -> tuple[Tensor, Tensor]:
        """A padded step -> logits float32 [R, V] and positions int64 [R] of its own rows, valid until the next run."""
        bucket, rows = step.slots.shape[0], step.num_tokens
        self._slots[:bucket].copy_(step.slots)
        self._num_rows.copy_(step.num_rows)
        forward, _ = self._replays[Key(bucket, step.num_queries)]
        forward()
        return self._results["logits"][:rows], self._results["positions"][:rows]

    def accept(self, step: StepBatch[Tensor], tokens: Tensor) -> Accepted:
        """Behind `run` of the same step: `tokens` int64 [R] that its rows sampled."""
        _, accept = self._replays[Key(step.slots.shape[0], step.num_queries)]
        if accept is None:
            return self._state.accept(step, tokens)
        self._tokens[: tokens.shape[0]].copy_(tokens)
        accept()
        return self._state.accepted(step.num_decode)

    @torch.inference_mode()
    def capture(self, collector: bool = False) -> None:
        """`collector`: leave Python's garbage collector on, to measure what it costs."""
        started = time.monotonic()
        with contextlib.nullcontext() if collector else without_collector():
            for key in self._keys:
                began = time.monotonic()
                self._slots.fill_(self._state.padding)
                self._num_rows.zero_()
                forward = self._capture(self._body(key))
                accept = self._capture(self._acceptance(key, self._accept)) if self._accept else None
                self._replays[key] = forward, accept
                log.debug("graphs captured rows=%dx%d seconds=%.2f", *key, time.monotonic() - began)
        log.info(
            "graphs captured buckets=%s seconds=%.1f", ",".join(map(str, self.buckets)), time.monotonic() - started
        )

    def _sequences(self, batch: HostBatch) -> int:
        """The largest number of sequences of a replica."""
        return max(batch.dp_num_sampled, default=batch.num_sampled)

    def _bucket(self, batch: HostBatch) -> int:
        return next(bucket for bucket in self.buckets if self._sequences(batch) <= bucket)

    def _capture(self, run: Callable[[], None]) -> Replay:
        for _ in range(WARMUPS):
            run()
        self._device.synchronize()
        return self._device.capture(run)

    def _body(self, key: Key) -> Callable[[], None]:
        state, forward, step = self._state, self._forward(key.bucket), self._step(key)

        def run() -> None:
            inputs = state.inputs(step)
            hidden, logits = forward(inputs)
            self._keep(positions=inputs.positions, logits=logits)
            if self._accept is not None:
                self._keep(hidden=hidden)

        return run

    def _acceptance(self, key: Key, accept: Accept) -> Callable[[], None]:
        state, step = self._state, self._step(key)
        tokens = self._tokens[: key.bucket * key.num_queries]

        def run() -> None:
            accept(step, state.inputs(step), self._results["hidden"][: tokens.shape[0]], tokens)

        return run

    def _step(self, key: Key) -> StepBatch[Tensor]:
        bucket, q = key
        step = StepBatch.decode(
            self._slots[:bucket], q, self._state.page_table.shape[1], self._num_rows, self._sample_rows[: bucket * q]
        )
        step.all_decode = True
        if self._dp > 1:
            step.dp_num_tokens, step.dp_num_sampled = (bucket * q,) * self._dp, (bucket,) * self._dp
        return step

    def _keep(self, **results: Tensor) -> None:
        """Copy to where `run` and the second graph find them. The first run, not captured, makes room for all."""
        for name, value in results.items():
            if name not in self._results:
                self._results[name] = value.new_zeros(self._sample_rows.shape[0], *value.shape[1:])
            self._results[name][: value.shape[0]].copy_(value)


def graph_keys(buckets: Sequence[int], num_queries: Callable[[int], int]) -> list[Key]:
    """Of every step that may come; the largest first."""
    bounds = itertools.pairwise((0, *buckets))
    keys = {Key(last, num_queries(count)) for below, last in bounds for count in range(below + 1, last + 1)}
    return sorted(keys, key=lambda key: key.bucket * key.num_queries, reverse=True)


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """Objects that live before a capture live after it, and a collection in between would look at all of them."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
