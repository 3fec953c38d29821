"""The row of every choice of an expert: expert e's rows lie together, so that grouped GEMMs read them as one matrix.

Expert e owns the rows [starts[e], ends[e]); starts are multiples of `alignment`, and the rows between are padding,
never read. All sizes are the host's upper bounds, so a graph can be captured; the real number of rows stays on the
device.

    few tokens       one launch, moe_route_few.py
    tokens' choices  --count-->  slot of each choice within its expert, counts  --last program-->  starts, ends
                     --place-->  row of each choice, and of each block of rows its expert
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.scratch import zeros
from millrace_kernels.triton.moe_blocks import Blocks, ExpertRoute
from millrace_kernels.triton.moe_route_few import FEW_TOKENS, route_few

CHUNK = 32  # choices that one program, a single warp, ranks
PLACE, PLACE_SCALED = 512, 64  # choices that one program places, and where their scales follow them
ALIGNED = 4  # tokens, of which a column of 4 bytes each is 16
MAX_ROWS = 9 << 14  # of a pass, before padding: 16,384 tokens of V3; more take turns, so scratch memory has a bound


@triton.jit
def local_expert(experts_ptr, token, choice, real, ROUTED: tl.constexpr, TOP_K: tl.constexpr):
    """The expert of a choice, -1 for none. Choice TOP_K is the shared expert, which comes after the routed ones."""
    expert = tl.load(experts_ptr + token * TOP_K + choice, mask=real & (choice < TOP_K), other=-1)
    return tl.where(real & (choice == TOP_K), ROUTED, expert)


@triton.jit(do_not_specialize=["num_tokens"])
def _count_kernel(
    experts_ptr, slots_ptr, counts_ptr, starts_ptr, ends_ptr, total_ptr, num_tokens,
    E: tl.constexpr, ROUTED: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, TOKENS: tl.constexpr,
    CHUNK: tl.constexpr, E_PAD: tl.constexpr, ALIGNMENT: tl.constexpr,
):  # fmt: skip
    """Ranks a chunk's choices of the same expert among themselves, then takes the chunk's slots of it at once.

    A token that names an expert twice has one row of it: `again` marks the second, which shares the slot of the first.
    """
    i = tl.arange(0, CHUNK)
    token, choice = tl.program_id(0) * TOKENS + i // CHOICES, i % CHOICES
    real = (i < TOKENS * CHOICES) & (token < num_tokens)
    expert = local_expert(experts_ptr, token, choice, real, ROUTED, TOP_K)
    held = expert >= 0
    same = (expert[:, None] == expert[None, :]) & held[:, None]
    before = i[None, :] < i[:, None]
    again = tl.sum((same & before & (token[:, None] == token[None, :])).to(tl.int32), axis=1) > 0
    counted = same & (again == 0)[None, :]
    rank = tl.sum((counted & before).to(tl.int32), axis=1) - again.to(tl.int32)
    leader = held & (rank == 0) & (again == 0)
    base = tl.atomic_add(counts_ptr + expert, tl.sum(counted.to(tl.int32), axis=1), mask=leader)
    base = tl.sum(tl.where(same & leader[None, :], base[None, :], 0), axis=1)
    tl.store(slots_ptr + token * CHOICES + choice, base + rank, mask=real & held)

    tl.debug_barrier()  # every thread's counts before this program's arrival
    arrived = tl.atomic_add(counts_ptr + E, 1)
    if arrived == tl.num_programs(0) - 1:
        e = tl.arange(0, E_PAD)
        count = tl.load(counts_ptr + e, mask=e < E, other=0, cache_modifier=".cg")
        room = (count + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
        start = tl.cumsum(room, axis=0) - room
        tl.store(starts_ptr + e, start, mask=e < E)
        tl.store(ends_ptr + e, start + count, mask=e < E)
        tl.store(total_ptr, tl.sum(room, axis=0))


@triton.jit(do_not_specialize=["num_tokens", "stride_scale_k"])
def _place_kernel(
    experts_ptr, slots_ptr, starts_ptr, rows_ptr, tokens_ptr, blocks_ptr, scales_ptr, out_scales_ptr,
    num_tokens, stride_scale_t, stride_scale_k, num_rows,
    ROUTED: tl.constexpr, TOP_K: tl.constexpr, CHOICES: tl.constexpr, ALIGNMENT: tl.constexpr, BLOCK: tl.constexpr,
    GROUPS: tl.constexpr, GROUPS_PAD: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    token, choice = i // CHOICES, i % CHOICES
    real = token < num_tokens
    expert = local_expert(experts_ptr, token, choice, real, ROUTED, TOP_K)
    held = expert >= 0
    slot = tl.load(slots_ptr + i, mask=held, other=0)
    row = tl.load(starts_ptr + expert, mask=held, other=0) + slot
    tl.store(rows_ptr + i, tl.where(held, row, -1), mask=real)
    if tokens_ptr is not None:
        tl.store(tokens_ptr + row, token, mask=held)
    if blocks_ptr is not None:
        tl.store(blocks_ptr + row // ALIGNMENT, expert, mask=held & (slot % ALIGNMENT == 0))
    if GROUPS:
        group = tl.arange(0, GROUPS_PAD)[:, None]
        at, mask = token[None, :] * stride_scale_t + group * stride_scale_k, held[None, :] & (group < GROUPS)
        scale = tl.load(scales_ptr + at, mask=mask)
        tl.store(out_scales_ptr + group * num_rows.to(tl.int64) + row[None, :], scale, mask=mask)


def route(
    experts: Tensor,
    num_held: int,
    shared_expert: bool,
    alignment: int,
    *,
    gather: bool = False,
    scales: Tensor | None = None,
) -> tuple[ExpertRoute, Blocks | None]:
    """experts int32 [T, K] with T > 0 -> where they go.

    Args:
        gather: whether Blocks are returned, for a kernel that gathers its rows itself.
        scales: float32 [T, D/128] of the tokens, to be gathered for Blocks.
    """
    num, top_k = experts.shape
    choices, routed = top_k + shared_expert, num_held - shared_expert
    assert 0 < choices <= CHUNK and experts.is_contiguous() and experts.dtype == torch.int32, experts.shape
    num_rows = most_rows(num, choices, num_held, alignment)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts.device)

    rows, ends, total = ints(num, choices), ints(num_held), ints(1)
    plan, blocks = ExpertRoute(rows, ends, total, num_rows), None
    if gather:
        gathered = None if scales is None else scales.new_empty(scales.shape[1], num_rows)
        blocks = Blocks(ints(num_rows), ints(num_rows // alignment), gathered)
    if num <= FEW_TOKENS:
        route_few(experts, routed, alignment, scales, plan, blocks)
        return plan, blocks
    counts = zeros(num_held + 1, experts.device)  # rows of each expert, and how many programs have arrived
    slots, starts, tokens = ints(num, choices), ints(num_held), CHUNK // choices
    _count_kernel[(triton.cdiv(num, tokens),)](
        experts, slots, counts, starts, ends, total, num, num_held, routed, top_k, choices, tokens,
        CHUNK, triton.next_power_of_2(num_held), alignment, num_warps=1,
    )  # fmt: skip
    _place(experts, slots, starts, rows, blocks, scales, routed, alignment)
    return plan, blocks


def _place(
    experts: Tensor, slots: Tensor, starts: Tensor, rows: Tensor, blocks: Blocks | None, scales: Tensor | None,
    routed: int, alignment: int,
) -> None:  # fmt: skip
    (num, choices), top_k = rows.shape, experts.shape[1]
    tokens, owners, gathered = blocks or (None, None, None)
    groups, size = (0, PLACE) if scales is None else (scales.shape[1], PLACE_SCALED)
    _place_kernel[(triton.cdiv(num * choices, size),)](
        experts, slots, starts, rows, tokens, owners, scales, gathered, num,
        *((0, 0) if scales is None else scales.stride()), 0 if gathered is None else gathered.shape[1],
        routed, top_k, choices, alignment, size, groups, triton.next_power_of_2(groups), num_warps=4,
    )  # fmt: skip


def most_rows(num_tokens: int, choices: int, num_held: int, alignment: int) -> int:
    """Upper bound of the rows: every choice, and almost a whole alignment for every expert that can be hit."""
    rows = num_tokens * min(choices, num_held)
    return triton.cdiv(rows + min(rows, num_held) * (alignment - 1), alignment) * alignment


def slices(num_tokens: int, choices: int, max_rows: int = MAX_ROWS) -> list[tuple[int, int]]:
    """The tokens as few equal slices whose choices are at most max_rows. Each begins where its scales and its choices
    begin at 16 bytes, as those of all tokens do: for another address Triton would compile the kernels again.
    """
    most = max(max_rows // choices // ALIGNED, 1) * ALIGNED
    count = max(-(-num_tokens // most), 1)
    step = max(-(-num_tokens // (count * ALIGNED)), 1) * ALIGNED
    return [(first, min(first + step, num_tokens)) for first in range(0, num_tokens, step)]
