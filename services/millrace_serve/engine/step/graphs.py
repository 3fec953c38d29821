"""Decode steps in graphs: one per bucket, a number of rows that steps are padded to.

1. `pad` lays a step of decode sequences out for its bucket, on the host: one block of integers and the page table.
2. `run` copies both to where the bucket's graph finds them, replays it, and gives the logits of all its rows.
3. `capture` made the graphs, the largest first, so that the others find room in its memory.

A padding row is token 0 at position 0 of a sequence of one token, whose KV goes to the sink; `num_tokens_device` keeps
it away from the experts, and nobody samples it. Rows never look at each other, so it changes nothing. Data-parallel
replicas replay the same bucket, idle ones with padding alone, because the experts' exchange has one shape for all.

On a CPU the replay is the call that would have been captured: the same padding and the same memory, without the speed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from millrace_serve.engine.step.batch import StepBatch
from millrace_serve.engine.step.device import Device, Replay
from millrace_serve.model.inputs import AttnPlan, ForwardInput

log = logging.getLogger(__name__)

BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 80, 96, 112, 128, 160, 192, 224, 256)
BUCKET_STEP = 64  # beyond the last of them
WARMUPS = 2  # runs before a capture: what libraries set up in a first run cannot be captured
ROW_ALIGN = 4  # rows to which a column is rounded up, so that each begins at 32 bytes

Forward = Callable[[ForwardInput], Tensor]  # -> logits float32 [T, V]
A = TypeVar("A", np.ndarray, Tensor)


def buckets_up_to(max_running: int, wanted: Sequence[int] = ()) -> tuple[int, ...]:
    """Ascending; the last one is max_running, so every step of decode sequences has a bucket."""
    sizes = wanted or (*BUCKETS, *range(BUCKETS[-1] + BUCKET_STEP, max_running, BUCKET_STEP))
    return (*sorted({size for size in sizes if size < max_running}), max_running)


@dataclass(frozen=True, slots=True)
class Columns(Generic[A]):
    """Views of one block int64 [columns_size(rows)]."""

    slots: A  # int64 [rows], whose last sampled token the row is
    positions: A  # int64 [rows]
    kv_slots: A  # int64 [rows]
    seq_lens: A  # int32 [rows]
    num_tokens: A  # int32 [1], rows that are no padding

    @classmethod
    def of(cls, block: A, rows: int, int32: Any) -> Columns[A]:
        """`int32`: as block.view takes it."""
        stride = _stride(rows)
        slots, positions, kv_slots = (block[i * stride : i * stride + rows] for i in range(3))
        short = block[3 * stride :].view(int32)
        return cls(slots, positions, kv_slots, short[:rows], short[2 * _stride(-(-rows // 2)) :][:1])


def columns_size(rows: int) -> int:
    return 3 * _stride(rows) + _stride(-(-rows // 2)) + 1


def _stride(rows: int) -> int:
    return -(-rows // ROW_ALIGN) * ROW_ALIGN


@dataclass(slots=True)
class PaddedRows(Generic[A]):
    bucket: int
    block: A  # int64, see Columns
    page_table: A  # int32 [bucket, P]


class DecodeGraphs:
    """Of one rank. Only the thread that launches steps uses it."""

    def __init__(
        self,
        device: Device,
        forward: Callable[[int], Forward],
        last_tokens: Tensor,
        buckets: Sequence[int],
        max_pages: int,
        vocab_size: int,
        dp: int = 1,
    ) -> None:
        """
        Args:
            forward: the function to capture for a bucket.
            last_tokens: int64 [slots + 1], the last token sampled on each slot; the last entry is 0, for padding.
            max_pages: of a sequence.
        """
        self._device, self._forward, self._last_tokens, self._dp = device, forward, last_tokens, dp
        self._padding_slot = last_tokens.shape[0] - 1
        self.buckets = tuple(buckets)
        largest, where = self.buckets[-1], device.torch
        self._block = torch.zeros(columns_size(largest), dtype=torch.int64, device=where)
        self._page_table = torch.zeros(largest, max_pages, dtype=torch.int32, device=where)
        self._cu_q = torch.arange(largest + 1, dtype=torch.int32, device=where)
        self._rows = torch.arange(largest, device=where)
        self._logits = torch.zeros(largest, vocab_size, device=where)
        self._replays: dict[int, Replay] = {}

    def bucket(self, batch: StepBatch) -> int | None:
        """Of a step; None: it cannot be a graph, here or on another replica."""
        if not batch.all_decode:
            return None
        rows = max(batch.dp_num_tokens, default=batch.num_tokens)
        return next((bucket for bucket in self.buckets if rows <= bucket), None)

    def pad(self, batch: StepBatch, bucket: int) -> PaddedRows[np.ndarray]:
        """A step with up to `bucket` rows, none included."""
        count = batch.num_tokens
        block = np.zeros(columns_size(bucket), np.int64)
        columns = Columns.of(block, bucket, np.int32)
        columns.slots[:count], columns.slots[count:] = batch.sample_slots, self._padding_slot
        columns.positions[:count] = batch.positions
        columns.kv_slots[:count] = batch.kv_slots
        columns.seq_lens[:count], columns.seq_lens[count:] = batch.seq_lens, 1
        columns.num_tokens[0] = count
        page_table = np.zeros((bucket, batch.page_table.shape[1]), np.int32)
        page_table[:count] = batch.page_table
        return PaddedRows(bucket, block, page_table)

    def run(self, rows: PaddedRows[Tensor]) -> Tensor:
        """float32 [bucket, V], valid until the next run."""
        bucket, pages = rows.page_table.shape
        self._block[: len(rows.block)].copy_(rows.block)
        self._page_table[:bucket, :pages].copy_(rows.page_table)
        self._replays[bucket]()
        return self._logits[:bucket]

    @torch.inference_mode()
    def capture(self, collector: bool = False) -> None:
        """`collector`: leave Python's garbage collector on, to measure what it costs."""
        started = time.monotonic()
        with contextlib.nullcontext() if collector else _without_collector():
            for bucket in reversed(self.buckets):
                began = time.monotonic()
                self._replays[bucket] = self._capture(bucket)
                log.debug("graph captured rows=%d seconds=%.2f", bucket, time.monotonic() - began)
        log.info(
            "graphs captured buckets=%s seconds=%.1f", ",".join(map(str, self.buckets)), time.monotonic() - started
        )

    def _capture(self, bucket: int) -> Replay:
        idle = self.pad(StepBatch.idle(), bucket)
        self._block[: len(idle.block)].copy_(torch.from_numpy(idle.block))
        self._page_table[:bucket].zero_()
        run = self._body(bucket)
        for _ in range(WARMUPS):
            run()
        self._device.synchronize()
        return self._device.capture(run)

    def _body(self, bucket: int) -> Callable[[], None]:
        columns = Columns.of(self._block[: columns_size(bucket)], bucket, torch.int32)
        forward = self._forward(bucket)
        attn = AttnPlan(
            num_decode=bucket,
            cu_q=self._cu_q[: bucket + 1],
            seq_lens=columns.seq_lens,
            page_table=self._page_table[:bucket],
            q_lens_host=(1,) * bucket,
            seq_lens_host=(1,) * bucket,  # of no meaning: what the host knows differs from replay to replay
        )

        def run() -> None:
            inputs = ForwardInput(
                token_ids=self._last_tokens[columns.slots],
                positions=columns.positions,
                kv_slots=columns.kv_slots,
                attn=attn,
                sample_rows=self._rows[:bucket],
                num_tokens=bucket,
                dp_num_tokens=(bucket,) * self._dp if self._dp > 1 else (),
                num_tokens_device=columns.num_tokens,
            )
            self._logits[:bucket].copy_(forward(inputs))

        return run


@contextlib.contextmanager
def _without_collector() -> Iterator[None]:
    """What lives before a capture lives after it, and a collection in between would look at all of it."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
