"""Attention of a prompt chunk whose rows are spread over the replicas of a worker (model/context_parallel/split.py).

Every replica gets the latent rows [c_kv | k_pe] of the whole chunk and, part by part, those of the tokens before it. So
its own rows attend to all keys that they may see, and only the owner of the sequence stores anything:

    rows of both blocks     causal, each block to itself
    rows of both blocks     all tokens before the low block
    rows of the high block  all tokens from there to the high block
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

import torch
import torch.nn.functional as F
from millrace_kernels.backend import KernelPlan
from millrace_kernels.kv_gather import kv_gather
from millrace_kernels.mla_qkv import kv_store
from torch import Tensor

from millrace_serve.model.inputs import ContextParallelRows

Lens = tuple[int, ...]
MakePlan = Callable[[Lens, Lens, bool], KernelPlan]  # queries and keys of each sequence, causal -> the kernel's plan


@dataclass(frozen=True, slots=True)
class KeyPart:
    """Tokens [start, end) of the sequence, which all queries of a call see."""

    start: int
    end: int
    plan: KernelPlan


@dataclass(frozen=True, slots=True)
class ContextParallelStep:
    rows: slice  # of the step's tokens: those of both blocks
    chunk: ContextParallelRows
    lens: tuple[int, int]  # of the blocks
    own_plan: KernelPlan
    for_both: tuple[KeyPart, ...]  # those before the chunk first, which are the same on every replica
    for_high: tuple[KeyPart, ...]

    @classmethod
    def prepare(cls, chunk: ContextParallelRows, first_row: int, part_tokens: int, plan: MakePlan) -> Self:
        """`part_tokens`: so many tokens, whole pages, have their k and v at a time."""

        def parts(num_queries: int, first: int, end: int) -> tuple[KeyPart, ...]:
            spans = [(start, min(start + part_tokens, end)) for start in range(first, end, part_tokens)]
            return tuple([KeyPart(*span, plan((num_queries,), (span[1] - span[0],), False)) for span in spans])

        split = chunk.split
        (low, low_end), (high, high_end) = split.blocks(split.me)
        lens, begin = (low_end - low, high_end - high), split.start
        return cls(
            rows=slice(first_row, first_row + sum(lens)),
            chunk=chunk,
            lens=lens,
            own_plan=plan(lens, lens, True),
            for_both=parts(sum(lens), 0, begin) + parts(sum(lens), begin, begin + low),
            for_high=parts(lens[1], begin + low, begin + high),
        )

    def exchange(self, own: Tensor, kv: Tensor, latent_width: int) -> Tensor:
        """own [P, C+R], rows of this replica -> [n, C+R] of the chunk, which its owner stores. Collective over dp."""
        split = self.chunk.split
        longest = max(map(split.num_rows, range(split.replicas)))
        gathered = self.chunk.dims.dp_all_gather(F.pad(own, (0, 0, 0, longest - own.shape[0])))
        rows = torch.cat([gathered[replica, first:end] for replica, (first, end) in split.order()])
        if split.mine:
            kv_store(kv, self.chunk.kv_slots, rows[:, :latent_width], rows[:, latent_width:])
        return rows

    def keys(self, part: KeyPart, chunk_rows: Tensor, kv: Tensor) -> Tensor:
        """[end - start, C+R] of a part. Collective over dp where the part lies before the chunk."""
        split, count = self.chunk.split, part.end - part.start
        if part.start >= split.start:
            return chunk_rows[part.start - split.start :][:count]
        if split.mine:
            rows = kv_gather(kv, self.chunk.page_table, [part.start], [count]).to(chunk_rows.dtype)
        else:
            rows = chunk_rows.new_empty(count, chunk_rows.shape[1])
        return self.chunk.dims.dp_broadcast(rows, split.owner)
