"""Decode steps in graphs: one per (sequences, rows of each), where a number of sequences is padded to a bucket.

1. `pad` fills a step up with sequences of the padding slot, on the host.
2. `run` copies the step's slots to where the graph finds them, replays it, and gives logits and positions of all rows.
3. `capture` made the graphs, the largest first, so that the others find room in its memory.

Everything else that a graph reads is the state of the slots on the device (engine/step/slots.py). The padding slot has
length 0 and capacity 0, so the KV of its rows goes to the sink; `num_rows` keeps them away from the experts, and no
result is taken from them. Rows are independent, so padding changes nothing. Data-parallel replicas replay the same
bucket, idle ones with padding alone, because the experts' exchange has one shape for all.

On a CPU the replay is the call that would have been captured: the same padding and the same memory, without the speed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from millrace_serve.engine.step.batch import HostBatch, StepBatch
from millrace_serve.engine.step.device import Device, Replay
from millrace_serve.engine.step.slots import Slots, decode_rows
from millrace_serve.model.inputs import ForwardInput

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
BUCKET_STEP = 64  # beyond the last of them
WARMUPS = 2  # runs before a capture: what libraries set up in a first run cannot be captured

Forward = Callable[[ForwardInput], Tensor]  # -> logits float32 [T, V]


def buckets_up_to(max_running: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """Ascending; the last one is max_running, so every step of decode sequences has a bucket."""
    sizes = wanted or (*BUCKETS, *range(BUCKETS[-1] + BUCKET_STEP, max_running, BUCKET_STEP))
    return (*sorted({size for size in sizes if size < max_running}), max_running)


class DecodeGraphs:
    """The graphs of one rank, used only by the thread that launches steps."""

    def __init__(
        self,
        device: Device,
        forward: Callable[[int], Forward],
        slots: Slots,
        buckets: Sequence[int],
        vocab_size: int,
        dp: int = 1,
        num_queries: Sequence[int] = (1,),
    ) -> None:
        """
        Args:
            forward: what is captured for a bucket
            num_queries: rows of each sequence for which there are graphs
        """
        self._device, self._forward, self._state, self._dp = device, forward, slots, dp
        self.buckets = tuple(buckets)
        self._num_queries = tuple(num_queries)
        largest, where = self.buckets[-1], device.torch
        rows = largest * max(self._num_queries)
        self._slots = torch.full((largest,), slots.padding, device=where)
        self._num_rows = torch.zeros(1, dtype=torch.int32, device=where)
        self._positions = torch.zeros(rows, dtype=torch.int64, device=where)
        self._logits = torch.zeros(rows, vocab_size, device=where)
        # Kept here and not by what is captured: a graph holds addresses, and no memory of theirs outside its own pool.
        self._rows = {q: decode_rows(largest, q, where) for q in self._num_queries}
        self._cu_q = {q: torch.arange(0, largest * q + 1, q, dtype=torch.int32, device=where) for q in self._rows}
        self._sample_rows = torch.arange(rows, device=where)
        self._replays: dict[tuple[int, int], Replay] = {}

    def holds(self, batch: HostBatch) -> bool:
        """Whether the step can be a graph, here and on every other replica."""
        return (
            batch.all_decode and batch.num_queries in self._num_queries and self._sequences(batch) <= self.buckets[-1]
        )

    def pad(self, batch: HostBatch) -> HostBatch:
        """`batch` with the slots of its bucket; there may be none in it."""
        bucket = next(bucket for bucket in self.buckets if self._sequences(batch) <= bucket)
        slots = np.full(bucket, self._state.padding)
        slots[: batch.num_decode] = batch.slots
        return dataclasses.replace(batch, slots=slots)

    def run(self, step: StepBatch[Tensor]) -> tuple[Tensor, Tensor]:
        """A padded step -> logits float32 [T, V] and positions int64 [T] of its own rows, valid until the next run."""
        bucket, rows = step.slots.shape[0], step.num_tokens
        self._slots[:bucket].copy_(step.slots)
        self._num_rows.copy_(step.num_rows)
        self._replays[bucket, step.num_queries]()
        return self._logits[:rows], self._positions[:rows]

    @torch.inference_mode()
    def capture(self, collector: bool = False) -> None:
        """`collector`: leave Python's garbage collector on, to measure what it costs."""
        started = time.monotonic()
        keys = sorted(((b, q) for b in self.buckets for q in self._num_queries), key=lambda key: -key[0] * key[1])
        with contextlib.nullcontext() if collector else _without_collector():
            for bucket, num_queries in keys:
                began = time.monotonic()
                self._replays[bucket, num_queries] = self._capture(bucket, num_queries)
                log.debug("graph captured rows=%dx%d seconds=%.2f", bucket, num_queries, time.monotonic() - began)
        log.info(
            "graphs captured buckets=%s seconds=%.1f", ",".join(map(str, self.buckets)), time.monotonic() - started
        )

    def _sequences(self, batch: HostBatch) -> int:
        """The largest number of sequences of a replica."""
        return max(batch.dp_num_tokens, default=batch.num_tokens) // batch.num_queries

    def _capture(self, bucket: int, num_queries: int) -> Replay:
        self._slots.fill_(self._state.padding)
        self._num_rows.zero_()
        run = self._body(bucket, num_queries)
        for _ in range(WARMUPS):
            run()
        self._device.synchronize()
        return self._device.capture(run)

    def _body(self, bucket: int, num_queries: int) -> Callable[[], None]:
        state, forward, total = self._state, self._forward(bucket), bucket * num_queries
        seq_of_row, offsets = self._rows[num_queries]
        rows = seq_of_row[:total], offsets[:total]
        step = StepBatch(
            num_decode=bucket,
            num_queries=num_queries,
            num_pages=state.max_pages,
            slots=self._slots[:bucket],
            cu_q=self._cu_q[num_queries][: bucket + 1],
            num_rows=self._num_rows,
            chunk_tokens=self._sample_rows[:0],
            chunk_lens=(),
            chunk_ends=(),
            sampling_chunks=(),
            sample_rows=self._sample_rows[:total],
            sample_slots=self._slots[:bucket],
            sampling=None,
            dp_num_tokens=(total,) * self._dp if self._dp > 1 else (),
        )

        def run() -> None:
            inputs = state.inputs(step, rows)
            self._positions[:total].copy_(inputs.positions)
            self._logits[:total].copy_(forward(inputs))

        return run


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """Objects that live before a capture live after it, and a collection in between would look at all of them."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
