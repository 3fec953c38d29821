"""The attention data that all layers of a step share: rotary rows, the form, and the kernels' plans, made once a step.

Two forms of the same maths (model/mla.py has the formulas); decode sequences are always absorbed, prompt chunks either:
    expanded   k and v of the step's own tokens are computed per head, and those of the cached prefix, chunk by chunk;
               the partial results are merged by their log-sum-exp
    absorbed   all heads attend to the cached rows themselves
"""

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from millrace_kernels import mla_decode, mla_prefill
from millrace_kernels.backend import KernelPlan
from millrace_kernels.mla_prefill import Heads
from millrace_kernels.tuned import Table
from torch import Tensor

from millrace_serve.model.context_parallel.attention_step import ContextParallelStep, Lens, MakePlan
from millrace_serve.model.inputs import AttnPlan, ForwardInput
from millrace_serve.model.sparse_step import IndexPool, SparseGroup, sparse_groups

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]  # q [T, H, N+R], c_kv [T, C], k_pe [T, R] of a layer -> [T, H*V]


@dataclass(frozen=True, slots=True)
class FormThresholds:
    absorb_max_queries: int  # queries per key up to which cached prefixes are absorbed
    prefix_chunk_tokens: int = 4096  # prefix tokens, over all sequences, whose k and v exist at a time

    @classmethod
    def measured(cls, device: torch.device, num_heads: int) -> "FormThresholds":
        """The break-even on this GPU (`millrace_kernels.tuned`), for so many heads of a rank or the next more."""
        if device.type != "cuda":
            return CPU
        rows = FORM_TABLE.rows or {(128,): H200}
        nearest = rows[min(rows, key=lambda key: (key[0] < num_heads, abs(key[0] - num_heads)))]
        return replace(nearest, prefix_chunk_tokens=prefix_chunk_tokens(num_heads))

    def absorbs(self, q_lens: Sequence[int], seq_lens: Sequence[int]) -> bool:
        """Whether a step's prompt chunks are absorbed; never without cached tokens.

        Expanding costs per key, absorbing costs per (query, key) pair. So the number of queries that a key serves
        decides: the mean of q_len weighted by seq_len.
        """
        pairs = sum(q * seq for q, seq in zip(q_lens, seq_lens, strict=True))
        return tuple(q_lens) != tuple(seq_lens) and pairs <= self.absorb_max_queries * sum(seq_lens)


FORMS = {"absorbed": FormThresholds(sys.maxsize), "expanded": FormThresholds(0)}  # of every chunk behind cached tokens
CPU = FormThresholds(48)  # the references, one core, `models/tiny`
H200 = FormThresholds(320)  # with 128 heads; also where nothing was measured on a GPU of this capability
# By heads of a rank, from `python -m millrace_bench.kernels.forms`. An H200: with 16 heads expanding wins from 1,726
# queries on behind 32,768 cached tokens, and behind 1,024 to 16,384 never up to 2,048 queries; with 128 heads from 382,
# 311, 338 and 231 queries on behind 4,096, 8,192, 16,384 and 32,768 cached tokens.
FORM_TABLE = Table("attention_forms", FormThresholds)


@dataclass(frozen=True, slots=True)
class PrefixChunk:
    """A page-aligned part of the cached prefixes: `lens[b]` tokens of sequence b from `starts[b]` on."""

    starts: list[int]
    lens: list[int]
    plan: KernelPlan = None


@dataclass(frozen=True, slots=True)
class AbsorbedGroup:
    """Neighbouring sequences, or pieces of one, with equally many queries, so that one kernel call serves them."""

    rows: slice  # of the step's tokens
    num_queries: int  # of each sequence
    page_table: Tensor  # int32 [B, P]
    seq_lens: Tensor  # int32 [B]
    plan: KernelPlan


@dataclass(frozen=True, slots=True)
class AttnStep:
    inputs: ForwardInput
    cos: Tensor  # float32 [T, R/2]
    sin: Tensor
    absorbed: tuple[AbsorbedGroup, ...]
    expanded_rows: slice  # tokens of the prompt chunks that are expanded; empty when they are absorbed
    expanded_seqs: slice
    own_plan: KernelPlan  # of the expanded chunks' attention to themselves
    prefix: tuple[PrefixChunk, ...]
    shared: ContextParallelStep | None = None
    index: IndexPool | None = None  # of models with sparse attention
    sparse: tuple[SparseGroup, ...] = ()  # the first rows of the step: all heads attend to chosen rows, absorbed
    sparse_lens: Tensor | None = None  # int32 [rows of sparse], how many each of them chooses
    attend: Attend | None = None  # in the place of each layer's own attention

    @classmethod
    def prepare(
        cls,
        inputs: ForwardInput,
        tables: tuple[Tensor, Tensor],
        thresholds: FormThresholds,
        heads: Heads,
        kv: Tensor,
        dtype: torch.dtype,
        index: IndexPool | None = None,
        index_topk: int = 0,
    ) -> Self:
        """`tables`: cos and sin by position; `kv`: one layer of the pool; `dtype`: of q, k and v."""
        attn = inputs.attn
        decode, first, end = attn.num_decode, sum(attn.q_lens_host[: attn.num_decode]), sum(attn.q_lens_host)
        q_lens, seq_lens = attn.q_lens_host[decode:], attn.seq_lens_host[decode:]
        sparse = () if index is None else sparse_groups(inputs, index_topk, kv.shape[1])
        chosen = sparse[-1].rows.stop if sparse else 0  # rows
        expand = chosen < end and bool(q_lens) and not thresholds.absorbs(q_lens, seq_lens)
        groups = _groups(attn, decode if expand else attn.num_seqs, heads, kv, chosen)
        most, page_size, shared = thresholds.prefix_chunk_tokens, kv.shape[1], None
        plan, own_plan, prefix = _planner(heads, inputs.device, dtype), None, []
        if expand:
            own_plan = plan(q_lens, q_lens, True)
            cached = [seq - own for seq, own in zip(seq_lens, q_lens, strict=True)]
            for starts, lens in prefix_chunks(cached, most, page_size):
                prefix.append(PrefixChunk(starts, lens, plan(q_lens, tuple(lens), False)))
        if inputs.shared is not None:
            shared = ContextParallelStep.prepare(inputs.shared, end, max(most // page_size, 1) * page_size, plan)
        return cls(
            inputs,
            cos=tables[0][inputs.positions],
            sin=tables[1][inputs.positions],
            absorbed=groups,
            expanded_rows=slice(first, end if expand else first),
            expanded_seqs=slice(decode, attn.num_seqs if expand else decode),
            own_plan=own_plan,
            prefix=tuple(prefix),
            shared=shared,
            index=index,
            sparse=sparse,
            sparse_lens=torch.cat([group.lens for group in sparse]).clamp(max=index_topk) if sparse else None,
        )


def _planner(heads: Heads, device: torch.device, dtype: torch.dtype) -> MakePlan:
    """Calls with equal lengths have one plan."""

    @functools.cache
    def plan(q_lens: Lens, k_lens: Lens, causal: bool) -> KernelPlan:
        return mla_prefill.plan(q_lens, k_lens, heads, causal, device, dtype)

    return plan


def prefix_chunk_tokens(num_heads: int) -> int:
    """As many keys and values as 4,096 tokens have with 128 heads, so that a rank with few heads makes few calls; up to
    16,384, for products are compiled ahead for as many rows.
    """
    return min(4096 * 128 // num_heads, 16384)


def prefix_chunks(prefix_lens: Sequence[int], max_tokens: int, page_size: int) -> list[tuple[list[int], list[int]]]:
    """(starts, lens) per sequence of each chunk; starts are page-aligned, a chunk has up to `max_tokens` rows."""
    sharing = sum(1 for n in prefix_lens if n)
    step = max(max_tokens // max(sharing, 1) // page_size, 1) * page_size
    return [
        ([min(start, n) for n in prefix_lens], [min(max(n - start, 0), step) for n in prefix_lens])
        for start in range(0, max(prefix_lens, default=0), step)
    ]


def _groups(attn: AttnPlan, num_seqs: int, heads: Heads, kv: Tensor, chosen: int) -> tuple[AbsorbedGroup, ...]:
    """The first `num_seqs` sequences, without those of the first `chosen` rows, in groups: the decode sequences, then
    runs of chunks of one length, or each longer chunk in pieces.
    """
    groups, row, first, most = [], 0, 0, mla_decode.most_queries(kv.dtype)
    while first < num_seqs:
        queries, stop = attn.q_lens_host[first], first + 1
        while queries <= most and stop < num_seqs and stop != attn.num_decode and attn.q_lens_host[stop] == queries:
            stop += 1
        end = row + (stop - first) * queries
        if row >= chosen:
            for num, page_table, seq_lens in _pieces(
                queries, attn.page_table[first:stop], attn.seq_lens[first:stop], most
            ):
                rows = slice(row, row + len(seq_lens) * num)
                plan = mla_decode.plan(seq_lens, num, heads.num_heads, kv.dtype)
                groups.append(AbsorbedGroup(rows, num, page_table, seq_lens, plan))
                row = rows.stop
        first, row = stop, end
    return tuple(groups)


def _pieces(queries: int, page_table: Tensor, seq_lens: Tensor, most: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(queries, page_table, seq_lens) of each group. More queries than `most` are of one sequence: the first few, then
    pieces of `most`, each with the keys up to its own last one.
    """
    if queries <= most:
        yield queries, page_table, seq_lens
        return
    pieces, rest = divmod(queries, most)
    if rest:
        yield rest, page_table, seq_lens - pieces * most
    behind = torch.arange(pieces - 1, -1, -1, dtype=seq_lens.dtype, device=seq_lens.device) * most
    yield most, page_table.repeat(pieces, 1), seq_lens - behind
