"""The two kernels of `exchange.py`, whose description has the letters."""

import triton
import triton.language as tl

from millrace_kernels.peer.signals import peer, signal_all, wait_all
from millrace_kernels.triton.quant import quantise


@triton.jit
def _choices(
    ids, places, row, num_rows, turn, RANK: tl.constexpr, COPIES: tl.constexpr, E: tl.constexpr, SLOTS: tl.constexpr,
    TP: tl.constexpr, TP_RANK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr,
):  # fmt: skip
    """The group's member and its slot of each choice of a row, both [C_PAD]; member -1: none of this group.

    A row from num_rows on has no choices.
    """
    choice = tl.arange(0, C_PAD)
    expert = tl.load(ids + row * K + choice, mask=(choice < K) & (row < num_rows), other=-1)
    place = tl.load(places + turn % COPIES * (E + 1) + tl.where(expert < 0, E, expert))
    holder = place // SLOTS
    member = tl.where((place >= 0) & (holder % TP == TP_RANK), holder // TP, -1)
    shared = (choice >= K) & (choice < C) & (tl.max(expert, axis=0) >= 0)
    return tl.where(shared, RANK, member), tl.where(shared, SLOTS, place % SLOTS)


@triton.jit(do_not_specialize=["num_rows", "first"])
def dispatch_kernel(
    x, weights, ids, places, bases, state, error, num_rows, first, x_stride,
    rows_at, scales_at, slots_at, weights_at, flags_at,
    RANK: tl.constexpr, SIZE: tl.constexpr, COPIES: tl.constexpr, E: tl.constexpr, SLOTS: tl.constexpr,
    TP: tl.constexpr, TP_RANK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr,
    D: tl.constexpr, GROUPS: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    dtype: tl.constexpr = tl.float8e4nv if QUANT else x.dtype.element_ty
    choice, group = tl.arange(0, C_PAD), tl.arange(0, GROUPS)
    col = group[:, None] * 128 + tl.arange(0, 128)[None, :]
    for row in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        from_row, to_row = tl.cast(row, tl.int64), tl.cast(first + row, tl.int64)
        member, slot = _choices(ids, places, row, num_rows, to_row, RANK, COPIES, E, SLOTS, TP, TP_RANK, K, C, C_PAD)
        weight = tl.load(weights + row * K + choice, mask=choice < K, other=1.0)
        values = tl.load(x + from_row * x_stride + col, mask=col < D, other=0.0)
        if QUANT:
            values, scale = quantise(values.to(tl.float32))
        for to in tl.static_range(SIZE):
            at = to_row * C + choice
            tl.store(peer(bases, to, slots_at, tl.int32) + at, tl.where(member == to, slot, -1), mask=choice < C)
            tl.store(peer(bases, to, weights_at, tl.float32) + at, weight, mask=choice < C)
            if tl.max((member == to).to(tl.int32), axis=0) > 0:
                tl.store(peer(bases, to, rows_at, dtype) + to_row * D + col, values, mask=col < D)
                if QUANT:
                    to_scales = peer(bases, to, scales_at, tl.float32) + to_row * (D // 128)
                    tl.store(to_scales + group, scale, mask=group < D // 128)
    tl.debug_barrier()
    if tl.atomic_add(state + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:  # all programs of this rank are done
        epoch = tl.load(state) + 1
        tl.debug_barrier()  # every warp has read it before one of them writes it
        tl.store(state, epoch)
        tl.store(state + 1, 0)
        signal_all(bases, flags_at + 4 * RANK, epoch, SIZE)
        wait_all(peer(bases, RANK, flags_at, tl.int32), epoch, tl.load(state + 2), error, SIZE)


@triton.jit(do_not_specialize=["num_rows", "first"])
def combine_kernel(
    out, ids, places, bases, state, error, num_rows, first, partial_at, flags_at,
    RANK: tl.constexpr, SIZE: tl.constexpr, COPIES: tl.constexpr, E: tl.constexpr, SLOTS: tl.constexpr,
    TP: tl.constexpr, TP_RANK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, C_PAD: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    epoch, row = tl.load(state), tl.program_id(0)
    if (row == 0) & (tl.program_id(1) == 0):  # this rank's experts ran before this kernel
        signal_all(bases, flags_at + 4 * RANK, epoch, SIZE)
    member, _ = _choices(ids, places, row, num_rows, first + row, RANK, COPIES, E, SLOTS, TP, TP_RANK, K, C, C_PAD)
    wait_all(peer(bases, RANK, flags_at, tl.int32), epoch, tl.load(state + 2), error, SIZE)
    col = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    while row < num_rows:
        at = tl.cast(first + row, tl.int64) * D + col
        total = tl.zeros([BLOCK_D], tl.float32)
        for of in tl.static_range(SIZE):  # masks and not branches, so that all loads are under way at once
            chosen = tl.max((member == of).to(tl.int32), axis=0) > 0
            part = peer(bases, of, partial_at, out.dtype.element_ty) + at
            total += tl.load(part, mask=chosen & (col < D), other=0.0, cache_modifier=".cg").to(tl.float32)
        tl.store(out + tl.cast(row, tl.int64) * D + col, total, mask=col < D)
        row += tl.num_programs(0)
        member, _ = _choices(ids, places, row, num_rows, first + row, RANK, COPIES, E, SLOTS, TP, TP_RANK, K, C, C_PAD)
