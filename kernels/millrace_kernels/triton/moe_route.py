"""The row of every choice of an expert: expert e's rows lie together, so that grouped GEMMs read them as one matrix.

Expert e owns the rows [starts[e], ends[e]); starts are multiples of `alignment`, and the rows between are padding,
never read. All sizes are the host's upper bounds, so a graph can be captured; the real number of rows stays on the
device.

    few tokens       one launch without atomics: every expert's program finds out itself where its rows are
    tokens' choices  --count-->  slot of each choice within its expert, counts  --last program-->  starts, ends
                     --place-->  row of each choice, and of each block of rows its expert
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.moe_experts import MAX_ROWS
from millrace_kernels.scratch import zeros

CHUNK = 32  # choices that one program, a single warp, ranks
PLACE, PLACE_SCALED = 512, 64  # choices that one program places, and where their scales follow them
ALIGNED = 4  # tokens, of which a column of 4 bytes each is 16
FEW_TOKENS = 256  # whose choices a program can hold
LANES = 128  # of a program; as many tokens at least, or lanes would hold copies, which a histogram counts
PARTS = 4  # programs of an expert, where scales have to be gathered


class ExpertRoute(NamedTuple):
    """Letters: T tokens, C choices per token (top-k, and the shared expert), E experts held here."""

    rows: Tensor  # int32 [T, C], the row of each choice, -1 for a choice without one
    ends: Tensor  # int32 [E], one past each expert's last row
    total: Tensor  # int32 [1], one past the last row, padding included
    num_rows: int  # the most rows that there can be


class Blocks(NamedTuple):
    """The input of a kernel that gathers its own rows, valid up to `total`; blocks beyond are arbitrary."""

    tokens: Tensor  # int32 [num_rows], whose token a row is
    experts: Tensor  # int32 [num_rows / alignment], the expert of a block of `alignment` rows
    scales: Tensor | None  # float32 [D/128, num_rows], of the rows' FP8 groups


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
    tl.store(tokens_ptr + row, token, mask=held)
    tl.store(blocks_ptr + row // ALIGNMENT, expert, mask=held & (slot % ALIGNMENT == 0))
    if GROUPS:
        group = tl.arange(0, GROUPS_PAD)[:, None]
        at, mask = token[None, :] * stride_scale_t + group * stride_scale_k, held[None, :] & (group < GROUPS)
        scale = tl.load(scales_ptr + at, mask=mask)
        tl.store(out_scales_ptr + group * num_rows.to(tl.int64) + row[None, :], scale, mask=mask)


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
    """A program reads all choices and counts them for all experts (a histogram): so it knows the start of its own one.
    The rank of a token among those of its expert is a running sum. Rows of an expert are in the tokens' order.
    """
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
        tl.store(tokens_ptr + row, t, mask=chosen)
        tl.store(blocks_ptr + row // ALIGNMENT, mine, mask=chosen & (rank % ALIGNMENT == 0))
        if mine == 0:
            tl.store(ends_ptr + e, starts + count, mask=e < E)
            tl.store(total_ptr, tl.sum(room, axis=0))
    if GROUPS:
        tl.store(out_scales_ptr + group * num_rows.to(tl.int64) + row[None, :], scales, mask=gathered)


def route(
    experts: Tensor, num_held: int, shared_expert: bool, alignment: int, scales: Tensor | None = None
) -> tuple[ExpertRoute, Blocks]:
    """experts int32 [T, K] with T > 0 -> where they go. scales: float32 [T, D/128] of the tokens, to be gathered."""
    num, top_k = experts.shape
    choices, routed = top_k + shared_expert, num_held - shared_expert
    assert 0 < choices <= CHUNK and experts.is_contiguous() and experts.dtype == torch.int32, experts.shape
    num_rows = most_rows(num, choices, num_held, alignment)

    def ints(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=experts.device)

    rows, ends, total = ints(num, choices), ints(num_held), ints(1)
    gathered = None if scales is None else scales.new_empty(scales.shape[1], num_rows)
    plan = ExpertRoute(rows, ends, total, num_rows)
    blocks = Blocks(ints(num_rows), ints(num_rows // alignment), gathered)
    if num <= FEW_TOKENS:
        _route_few(experts, routed, alignment, scales, plan, blocks)
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
    experts: Tensor, slots: Tensor, starts: Tensor, rows: Tensor, blocks: Blocks, scales: Tensor | None,
    routed: int, alignment: int,
) -> None:  # fmt: skip
    (num, choices), top_k = rows.shape, experts.shape[1]
    tokens, owners, gathered = blocks
    groups, size = (0, PLACE) if scales is None else (scales.shape[1], PLACE_SCALED)
    _place_kernel[(triton.cdiv(num * choices, size),)](
        experts, slots, starts, rows, tokens, owners, scales, gathered, num,
        *((0, 0) if scales is None else scales.stride()), 0 if gathered is None else gathered.shape[1],
        routed, top_k, choices, alignment, size, groups, triton.next_power_of_2(groups), num_warps=4,
    )  # fmt: skip


def _route_few(
    experts: Tensor, routed: int, alignment: int, scales: Tensor | None, out: ExpertRoute, blocks: Blocks
) -> None:
    """experts int32 [T, K] with T <= FEW_TOKENS -> all of `out` and `blocks`, as `route` fills them."""
    (num, top_k), num_held = experts.shape, out.ends.shape[0]
    assert 0 < num <= FEW_TOKENS and experts.is_contiguous(), experts.shape
    tokens, owners, gathered = blocks
    groups, parts = (0, 1) if scales is None else (scales.shape[1], PARTS)
    _route_few_kernel[(num_held, parts)](
        experts, out.rows, out.ends, out.total, tokens, owners, scales, gathered, num,
        *((0, 0) if scales is None else scales.stride()), 0 if gathered is None else gathered.shape[1],
        num_held, routed, top_k, triton.next_power_of_2(top_k), max(triton.next_power_of_2(num), LANES),
        triton.next_power_of_2(num_held), alignment, groups, triton.next_power_of_2(triton.cdiv(groups, parts)),
        num_warps=LANES // 32,
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
