"""Steps without requests: to measure the memory of the largest one, and to have every kernel compiled before the first
request asks for it. All of their KV lies in the null page, and they go through the runner as real ones do.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from millrace_kernels.backend import SMALL_TOKENS

from millrace_serve.engine.config import Limits, shared_tokens
from millrace_serve.engine.step.batch import ContextParallelChunk, HostBatch, SlotUpdates, StepBatch
from millrace_serve.engine.step.graphs import graph_keys
from millrace_serve.engine.step.sampling_batch import HostSampling, SamplingBatch
from millrace_serve.model.context_parallel.split import Split

PREFIX_TOKENS = 4096  # cached tokens before a chunk


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step: `num_decode` sequences, and chunks of `chunk` tokens after `prefix` cached ones."""

    num_decode: int = 0
    num_queries: int = 1  # as in StepBatch
    chunks: int = 0
    chunk: int = 0
    prefix: int = 0
    greedy: bool = True
    pages: int = 0  # of the longest decode sequence, where they are more than a chunk's

    @property
    def num_tokens(self) -> int:
        return self.num_decode * self.num_queries + self.chunks * self.chunk


def largest(limits: Limits, expanded: int) -> StepShape:
    """The step that needs most memory: prompt chunks after cached tokens, all slots in use and sampling from top_p.

    Args: expanded: cached tokens of which k and v are made at a time.
    """
    chunks, chunk = _chunks(limits, limits.max_prefill_tokens)
    return _shape(limits, limits.max_running - chunks, chunks, chunk, _prefix(limits, chunk, expanded), greedy=False)


def prefill_shapes(limits: Limits, index_topk: int = 0) -> list[StepShape]:
    """With sparse attention also the shapes that are so short that all keys are chosen, where it is dense; and one of
    them beside decode sequences that are longer.
    """
    found = list(_prefill_shapes(limits))
    if 0 < index_topk < limits.max_model_len:
        short = limits.model_copy(update={"max_model_len": index_topk + 1})
        found += _prefill_shapes(short)
        if limits.max_running > 1:
            one = _shape(limits, 1, chunks=1, chunk=1, prefix=min(_prefix(short, 1), limits.page_size))
            found += [replace(one, pages=pages) for pages in _sizes(_prefix(limits, 1) // limits.page_size)]
    return list(dict.fromkeys(found))


def _prefill_shapes(limits: Limits) -> Iterator[StepShape]:
    """1. Prompts of every size in `_sizes`, and of every one up to SMALL_TOKENS, where kernels change most often.
    2. Prompts of every size behind cached tokens.
    3. One token behind 1, 2, 4, … pages, beside a decode sequence: keys are split up by the width of the page table.
    4. Every number of prompts: the last layer has as many rows.
    """
    longest = min(limits.max_prefill_tokens, limits.max_model_len - 1)
    for length in sorted({*range(1, min(SMALL_TOKENS, longest) + 1), *_sizes(longest)}):
        yield _shape(limits, chunks=1, chunk=length)
    for length in _sizes(min(longest, limits.max_model_len - 1 - limits.page_size)):
        yield _shape(limits, chunks=1, chunk=length, prefix=_prefix(limits, length))
    if limits.max_running > 1:
        for pages in (0, *_sizes(_prefix(limits, 1) // limits.page_size)):
            yield _shape(limits, 1, chunks=1, chunk=1, prefix=pages * limits.page_size)
    for count in _sizes(min(limits.max_running, longest)):
        yield _shape(limits, chunks=count, chunk=min(longest // count, 2))
    count = min(4, limits.max_running, longest)
    yield _shape(limits, chunks=count, chunk=longest // count)
    yield _shape(limits, limits.max_running - 1, chunks=1, chunk=longest, greedy=False)


def most_rows(limits: Limits, shapes: Sequence[StepShape], expanded: int) -> int:
    """Of a product: the tokens of a step, or the cached ones of which k and v are made at a time."""
    return max(*(shape.num_tokens for shape in shapes), min(expanded, limits.max_running * limits.max_model_len))


def _shape(
    limits: Limits, num_decode: int = 0, chunks: int = 0, chunk: int = 0, prefix: int = 0, *, greedy: bool = True
) -> StepShape:
    """With as many rows of each sequence as such a step has."""
    return StepShape(num_decode, limits.num_queries(num_decode + chunks), chunks, chunk, prefix, greedy)


def _sizes(most: int) -> list[int]:
    """Powers of two, `most`, and an odd one between two of them (Triton compiles for multiples of 16 apart)."""
    powers = [1 << i for i in range(most.bit_length()) if 1 << i < most] + [most]
    return sorted({*powers, *(3 * power // 4 - 1 for power in powers if power > 4)}) if most > 0 else []


def chunk_shape(limits: Limits, rows: int) -> StepShape:
    """A step of so many rows: prompt chunks as far as they may go, and decode sequences."""
    chunks, chunk = _chunks(limits, min(rows, limits.max_prefill_tokens))
    decode = (rows - chunks * chunk) // limits.most_queries
    return _shape(limits, min(decode, limits.max_running - chunks), chunks, chunk)


def decode_shapes(limits: Limits, buckets: Sequence[int]) -> Iterator[StepShape]:
    """Of every graph: a bucket may come with several numbers of queries. Largest first, greedy and not."""
    for bucket, num_queries in graph_keys(buckets, limits.num_queries):
        yield StepShape(bucket, num_queries)
        yield StepShape(bucket, num_queries, greedy=False)


def batch_of(shape: StepShape, limits: Limits, dp: int = 1, *, graphs: bool = False) -> HostBatch:
    """Its sequences own no page, so all KV goes to the sink. `graphs`: let the step be one."""
    q = shape.num_queries
    lens = (q,) * shape.num_decode + (shape.chunk,) * shape.chunks
    ends = tuple(shape.prefix + size for size in lens[shape.num_decode :])
    slots, rows = np.arange(len(lens)), np.cumsum((0, *lens), dtype=np.int32)
    first = shape.num_decode * q
    chunk_tokens = np.arange(first, shape.num_tokens) % 100  # several, for their experts
    sample_rows = np.concatenate((np.arange(first), rows[shape.num_decode + 1 :].astype(np.int64) - 1))
    batch: HostBatch = StepBatch(
        num_decode=shape.num_decode,
        num_queries=q,
        num_pages=max(shape.pages, -(-(max(ends, default=1) + limits.most_queries - 1) // limits.page_size)),
        slots=slots,
        cu_q=rows,
        num_rows=rows[-1:],
        chunk_tokens=chunk_tokens,
        next_tokens=chunk_tokens if limits.most_queries > 1 else chunk_tokens[:0],
        chunk_lens=lens[shape.num_decode :],
        chunk_ends=ends,
        sampling_chunks=tuple(range(shape.chunks)),
        sample_rows=sample_rows,
        sample_slots=slots,
        sampling=None if shape.greedy else _sampling(len(sample_rows)),
        updates=_updates(slots, shape, limits),
    )
    if dp > 1:
        batch.dp_num_tokens, batch.dp_num_sampled = (shape.num_tokens,) * dp, (len(slots),) * dp
    batch.all_decode = graphs and batch.is_decode
    return batch


def shared_batch(limits: Limits, dp: int, dp_rank: int) -> HostBatch:
    """The largest shared chunk, of replica 0, behind cached tokens."""
    count = min(shared_tokens(limits.max_prefill_tokens) * dp, limits.max_model_len - 1)
    start = _prefix(limits, count)
    split = Split(0, dp_rank, dp, start, start + count)
    rows = tuple(map(split.num_rows, range(dp)))
    batch = StepBatch.idle()
    batch.num_pages = -(-split.end // limits.page_size)
    batch.num_rows = np.array([rows[dp_rank]], np.int32)
    tokens, slots = np.arange(count + 1) % 100, np.zeros(1, np.int64)
    batch.shared = (
        ContextParallelChunk(split, tokens, slots) if split.mine else ContextParallelChunk(split, tokens[:0], slots[:0])
    )
    batch.dp_num_tokens, batch.dp_num_sampled = rows, (0,) * dp
    return batch


def _updates(slots: np.ndarray, shape: StepShape, limits: Limits) -> SlotUpdates[np.ndarray]:
    """All slots join, behind their prefixes and with different tokens."""
    none, lengths = np.zeros(0, np.int64), np.where(slots < shape.num_decode, 0, shape.prefix)
    return SlotUpdates(
        page_slots=none,
        page_indexes=none,
        pages=none.astype(np.int32),
        grown=slots,
        capacity=np.zeros_like(slots),
        joined=slots,
        lengths=lengths,
        last_tokens=np.repeat(slots[:, None] % 100, limits.most_queries, axis=1),
        num_prompt=lengths,
        temperature=np.ones(len(slots), np.float32),
        seeds=np.zeros(len(slots), np.uint64),
    )


def _chunks(limits: Limits, tokens: int) -> tuple[int, int]:
    """How many prompt chunks so many tokens are, and tokens of each."""
    longest = limits.max_model_len - 1
    chunks = min(-(-tokens // longest), limits.max_running)
    return chunks, min(tokens // chunks, longest)


def _prefix(limits: Limits, chunk: int, most: int = PREFIX_TOKENS) -> int:
    """Whole pages."""
    return min(most, limits.max_model_len - 1 - chunk) // limits.page_size * limits.page_size


def _sampling(count: int) -> HostSampling:
    floats, zeros = np.ones(count, np.float32), np.zeros(count, np.int64)
    return SamplingBatch(floats, 0.95 * floats, 0 * floats, zeros, zeros.astype(np.uint64), np.arange(count))
