"""Steps without requests: to measure the memory of the largest one, and to have every kernel compiled before the first
request asks for it. All of their KV lies in the sink page, and they go through the runner as real ones do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from millrace_serve.engine.config import Limits
from millrace_serve.engine.step.batch import StepBatch
from millrace_serve.engine.step.sampling_batch import HostSampling, SamplingBatch

PREFIX_TOKENS = 4096  # cached tokens before a chunk: as many as are expanded at a time


@dataclass(frozen=True, slots=True)
class Shape:
    """A step: `num_decode` sequences of one token, and chunks of `chunk` tokens after `prefix` cached ones."""

    num_decode: int = 0
    chunks: int = 0
    chunk: int = 0
    prefix: int = 0
    greedy: bool = True

    @property
    def num_tokens(self) -> int:
        return self.num_decode + self.chunks * self.chunk


def largest(limits: Limits) -> Shape:
    """The step that needs most memory: prompt chunks after cached tokens, all slots in use and sampling from top_p."""
    longest = limits.max_model_len - 1
    chunks = min(-(-limits.max_prefill_tokens // longest), limits.max_running)
    chunk = min(limits.max_prefill_tokens // chunks, longest)
    return Shape(limits.max_running - chunks, chunks, chunk, _prefix(limits, chunk), greedy=False)


def prefill_shapes(limits: Limits) -> Iterator[Shape]:
    """Prompts of every size in `_sizes`, each without and with a cached prefix, and every number of prompts: the last
    layer has as many rows.
    """
    longest = min(limits.max_prefill_tokens, limits.max_model_len - 1)
    prefix = _prefix(limits, longest)
    for length in _sizes(longest):
        yield Shape(chunks=1, chunk=length)
        if prefix:
            yield Shape(chunks=1, chunk=length, prefix=prefix)
    for count in _sizes(min(limits.max_running, longest)):
        yield Shape(chunks=count, chunk=min(longest // count, 2))
    count = min(4, limits.max_running, longest)
    yield Shape(chunks=count, chunk=longest // count)
    yield Shape(num_decode=limits.max_running - 1, chunks=1, chunk=longest, greedy=False)


def _sizes(most: int) -> list[int]:
    """Powers of two, `most`, and an odd one between two of them (Triton compiles for multiples of 16 apart)."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]
    return sorted({*powers, *(3 * power // 4 - 1 for power in powers if power > 4)})


def decode_shapes(buckets: Sequence[int]) -> Iterator[Shape]:
    """Largest first, greedy and not."""
    for bucket in reversed(buckets):
        yield Shape(num_decode=bucket)
        yield Shape(num_decode=bucket, greedy=False)


def batch_of(shape: Shape, page_size: int, dp: int = 1, *, graphs: bool = False) -> StepBatch:
    """`graphs`: let the step be one."""
    q_lens = np.array([1] * shape.num_decode + [shape.chunk] * shape.chunks, np.int32)
    starts = np.array([0] * shape.num_decode + [shape.prefix] * shape.chunks, np.int64)
    positions = np.concatenate([np.arange(start, start + q) for start, q in zip(starts, q_lens, strict=True)])
    seq_lens = (starts + q_lens).astype(np.int32)
    pages = np.zeros((len(q_lens), -(-int(seq_lens.max()) // page_size)), np.int32)
    slots = np.arange(len(q_lens))
    batch = StepBatch(
        num_decode=shape.num_decode,
        token_ids=np.arange(shape.num_tokens) % 100,  # several, for their experts
        positions=positions.astype(np.int64),
        kv_slots=positions.astype(np.int64) % page_size,
        page_table=pages,
        q_lens=q_lens,
        seq_lens=seq_lens,
        sample_rows=np.cumsum(q_lens) - 1,
        sample_slots=slots,
        sampling=_sampling(len(slots), shape.greedy),
    )
    batch.dp_num_tokens = (shape.num_tokens,) * dp if dp > 1 else ()
    batch.all_decode = graphs and batch.is_decode
    return batch


def _prefix(limits: Limits, chunk: int) -> int:
    """Whole pages."""
    return min(PREFIX_TOKENS, limits.max_model_len - 1 - chunk) // limits.page_size * limits.page_size


def _sampling(count: int, greedy: bool) -> HostSampling:
    temperature = np.full(count, 0.0 if greedy else 1.0, np.float32)
    top_p, min_p, top_k = np.full(count, 0.95, np.float32), np.zeros(count, np.float32), np.zeros(count, np.int64)
    drawn = np.arange(0 if greedy else count)
    return SamplingBatch(temperature, top_p, min_p, top_k, np.zeros(count, np.uint64), np.zeros(count, np.int64), drawn)
