"""The route of few tokens in one launch, without atomics: every expert's program finds out itself where its rows are.

Each program reads all choices and counts them for all experts (a histogram), which gives the start of its own expert;
the rank of a token among those of its expert is a running sum over the tokens. Rows of an expert are in the tokens'
order.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.triton.moe_blocks import Blocks, ExpertRoute

FEW_TOKENS = 256  # whose choices a program can hold
LANES = 128  # of a program; as many tokens at least, or lanes would hold copies, which a histogram counts
PARTS = 4  # programs of an expert, where scales have to be gathered


@triton.jit
def _columns(experts_ptr, t, present, TOP_K: tl.constexpr):
    """The experts that the tokens' first, second, ... choices name, -1 for none: TOP_K times [T]."""
    columns = ()
    for choice in tl.static_range(TOP_K):
        columns += (tl.load(experts_ptr + t * TOP_K + choice, mask=present, other=-1),)  # type: ignore[assignment]  # Triton unrolls
    return columns


@triton.jit
def _counts(columns, TOP_K: tl.constexpr, K_PAD: tl.constexpr, BINS: tl.constexpr):
    """Tokens of every expert; one that names an expert twice counts once. Columns beyond TOP_K repeat the first."""
    level = ()
    for choice in tl.static_range(K_PAD):
        expert = columns[choice % TOP_K]
        for earlier in tl.static_range(choice):
            expert = tl.where(expert == columns[earlier % TOP_K], -1, expert)
        level += (expert,)  # type: ignore[assignment]  # Triton unrolls
    for height in tl.static_range(1, K_PAD.bit_length()):
        pairs = ()
        for i in tl.static_range(K_PAD >> height):
            pairs += (tl.cat(level[2 * i], level[2 * i + 1], can_reorder=True),)  # type: ignore[assignment]  # Triton unrolls
        level = pairs
    every = level[0]  # type: ignore[misc]  # Triton unrolls
    return tl.histogram(every, BINS, mask=every >= 0)


@triton.jit(do_not_specialize=["num_tokens", "stride_scale_k"])
def _route_few_kernel(
    experts_ptr, rows_ptr, ends_ptr, total_ptr, tokens_ptr, blocks_ptr, scales_ptr, out_scales_ptr,
    num_tokens, stride_scale_t, stride_scale_k, num_rows,
    E: tl.constexpr, ROUTED: tl.constexpr, TOP_K: tl.constexpr, K_PAD: tl.constexpr, T_PAD: tl.constexpr,
    BINS: tl.constexpr, ALIGNMENT: tl.constexpr, GROUPS: tl.constexpr, GROUPS_PART: tl.constexpr,
):  # fmt: skip
    mine, part = tl.program_id(0), tl.program_id(1)
    t, e = tl.arange(0, T_PAD), tl.arange(0, BINS)
    present = t < num_tokens
    columns = _columns(experts_ptr, t, present, TOP_K)
    chosen = present & (mine == ROUTED)  # all choose the shared expert
    for choice in tl.static_range(TOP_K):
        chosen = chosen | (columns[choice] == mine)
    if GROUPS:
        group = part * GROUPS_PART + tl.arange(0, GROUPS_PART)[:, None]
        gathered = chosen[None, :] & (group < GROUPS)
        scales = tl.load(scales_ptr + t[None, :] * stride_scale_t + group * stride_scale_k, mask=gathered)
    count = _counts(columns, TOP_K, K_PAD, BINS) + tl.where((e == ROUTED) & (e < E), num_tokens, 0)
    room = (count + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    starts = tl.cumsum(room, axis=0) - room
    rank = tl.cumsum(chosen.to(tl.int32), axis=0) - 1
    row = tl.sum(tl.where(e == mine, starts, 0), axis=0) + rank
    if part == 0:
        row_at = rows_ptr + t * (TOP_K + E - ROUTED)
        for choice in tl.static_range(TOP_K):
            tl.store(row_at + choice, row, mask=columns[choice] == mine)
            tl.store(row_at + choice, -1, mask=(columns[choice] < 0) & present & (mine == 0))
        tl.store(row_at + TOP_K, row, mask=present & (mine == ROUTED))
        if tokens_ptr is not None:
            tl.store(tokens_ptr + row, t, mask=chosen)
        if blocks_ptr is not None:
            tl.store(blocks_ptr + row // ALIGNMENT, mine, mask=chosen & (rank % ALIGNMENT == 0))
        if mine == 0:
            tl.store(ends_ptr + e, starts + count, mask=e < E)
            tl.store(total_ptr, tl.sum(room, axis=0))
    if GROUPS:
        tl.store(out_scales_ptr + group * num_rows.to(tl.int64) + row[None, :], scales, mask=gathered)


def route_few(
    experts: Tensor, routed: int, alignment: int, scales: Tensor | None, out: ExpertRoute, blocks: Blocks | None
) -> None:
    """experts int32 [T, K] with T <= FEW_TOKENS -> all of `out` and `blocks`, as `moe_route.route` fills them."""
    (num, top_k), num_held = experts.shape, out.ends.shape[0]
    assert 0 < num <= FEW_TOKENS and experts.is_contiguous(), experts.shape
    tokens, owners, gathered = blocks or (None, None, None)
    groups, parts = (0, 1) if scales is None else (scales.shape[1], PARTS)
    _route_few_kernel[(num_held, parts)](
        experts, out.rows, out.ends, out.total, tokens, owners, scales, gathered, num,
        *((0, 0) if scales is None else scales.stride()), 0 if gathered is None else gathered.shape[1],
        num_held, routed, top_k, triton.next_power_of_2(top_k), max(triton.next_power_of_2(num), LANES),
        triton.next_power_of_2(num_held), alignment, groups, triton.next_power_of_2(triton.cdiv(groups, parts)),
        num_warps=LANES // 32,
    )  # fmt: skip
