"""Sum over ranks, residual, RMS norm and FP8 form of rows in one kernel, through the memory that the ranks share.

Data is its own flag: a slot is all zeros until a row lies in it, and who reads a slot waits until no zero is left and
zeroes it again. A sender therefore turns +0 into -0. Nothing else orders a rank's stores, so a row costs one way over
NVLink. A slot exists twice, and each row has a phase bit that says which of the two its next call uses. Two are enough:
a rank sends the row of call n+2 after it has that of n+1 from all, and a rank sends n+1 when its kernel n is over.

Program p of every rank has rows p, p + programs, ... It sends all of them before it waits, and it waits for program p
of other ranks alone. All programs of a launch run at once.
"""

import triton
import triton.language as tl

from millrace_kernels.peer.signals import peer
from millrace_kernels.triton.quant import quantise


@triton.jit
def _never_zero(values):
    """The bits of bfloat16, with -0 for 0."""
    bits = values.to(tl.int16, bitcast=True)
    return tl.where(bits == 0, -32768, bits).to(tl.int16)


@triton.jit
def _arrived(slot, inside, who, polls, error):
    """Takes the bits of a slot as soon as all are there. After too many polls `who` goes into the error word."""
    bits, left = tl.load(slot, inside, other=1, volatile=True), tl.load(polls)
    missing = tl.max((bits == 0).to(tl.int32))
    while (missing > 0) & (left > 1):
        bits = tl.load(slot, inside, other=1, volatile=True)
        missing = tl.max((bits == 0).to(tl.int32))
        left -= 1
    if missing > 0:
        tl.atomic_cas(error, 0, 1 + who)
    tl.debug_barrier()  # of a few elements every warp has copies, and one that saw them zeroed would wait for ever
    tl.store(slot, tl.zeros_like(bits), inside)
    return bits


@triton.jit
def _sum(own, part, at, step, residual, inside, rank, polls, error, SIZE: tl.constexpr):
    """residual + the parts of all ranks in rank order, float32. `part` + other * step: a row's slot."""
    total = tl.zeros(at.shape, tl.float32)
    for other in tl.static_range(SIZE):
        if other == rank:
            total += tl.load(own + at, inside, other=0.0).to(tl.float32)
        else:
            bits = _arrived(part + other * step + at, inside, other, polls, error)
            total += bits.to(tl.bfloat16, bitcast=True).to(tl.float32)
    return (total + residual).to(tl.bfloat16)


@triton.jit
def _normed(total, gain, width, eps):
    values = total.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(tl.sum(values * values, axis=1), axis=0) / width + eps)
    return (values * inverse * gain.to(tl.float32)).to(tl.bfloat16)


@triton.jit(do_not_specialize=["num_rows", "scale_stride", "rank", "parts_at"])
def one_shot(
    x, residual, weight, out, total, data, scales, bases, phases, polls, error,
    parts_at, rank, num_rows, max_rows, width, eps, x_stride, residual_stride, scale_stride,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, PLAIN: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Every rank gets the parts of all rows from all other ranks, int16 [2, SIZE, max_rows, width] at `parts_at`."""
    groups = tl.arange(0, GROUPS)
    at = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = at < width
    step = max_rows.to(tl.int64) * width
    for number in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        bits = _never_zero(tl.load(x + row * x_stride + at, inside, other=0.0))
        slot = (tl.load(phases + row) * SIZE + rank) * step + row * width
        for other in tl.static_range(SIZE):
            if other != rank:
                tl.store(peer(bases, other, parts_at, tl.int16) + slot + at, bits, inside)
    parts = peer(bases, rank, parts_at, tl.int16)
    gain = tl.load(weight + at, inside, other=0.0)
    for number in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        phase = tl.load(phases + row)
        added = tl.load(residual + row * residual_stride + at, inside, other=0.0).to(tl.float32)
        part, own = parts + phase * SIZE * step + row * width, x + row * x_stride
        summed = _sum(own, part, at, step, added, inside, rank, polls, error, SIZE)
        normed = _normed(summed, gain, width, eps)
        tl.store(total + row * width + at, summed, inside)
        if PLAIN:
            tl.store(out + row * width + at, normed, inside)
        if QUANT:
            quantised, scale = quantise(normed.to(tl.float32))
            tl.store(data + row * width + at, quantised, inside)
            tl.store(scales + groups.to(tl.int64) * scale_stride + row, scale, groups * 128 < width)
        tl.store(phases + row, 1 - phase)


@triton.jit
def _send_result(
    bases, rank, sums_at, plain_at, data_at, scales_at, slot, scale_slot, inside, scaled, summed, normed, data, scale,
    SIZE: tl.constexpr, PLAIN: tl.constexpr, QUANT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    for other in tl.static_range(SIZE):
        if other != rank:
            if WHOLE:
                tl.store(peer(bases, other, sums_at, tl.int16) + slot, summed, inside)
            if PLAIN:
                tl.store(peer(bases, other, plain_at, tl.int16) + slot, normed, inside)
            if QUANT:
                tl.store(peer(bases, other, data_at, tl.int8) + slot, data, inside)
                tl.store(peer(bases, other, scales_at, tl.int32) + scale_slot, scale, scaled)


@triton.jit
def _take_result(
    bases, rank, sums_at, plain_at, data_at, scales_at, slot, scale_slot, inside, scaled, who, polls, error,
    total, out, data, scales,
    PLAIN: tl.constexpr, QUANT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    if PLAIN:
        bits = _arrived(peer(bases, rank, plain_at, tl.int16) + slot, inside, who, polls, error)
        tl.store(out, bits.to(tl.bfloat16, bitcast=True), inside)
    if QUANT:
        bits = _arrived(peer(bases, rank, data_at, tl.int8) + slot, inside, who, polls, error)
        tl.store(data, bits.to(tl.float8e4nv, bitcast=True), inside)
        bits = _arrived(peer(bases, rank, scales_at, tl.int32) + scale_slot, scaled, who, polls, error)
        tl.store(scales, bits.to(tl.float32, bitcast=True), scaled)
    if WHOLE:
        bits = _arrived(peer(bases, rank, sums_at, tl.int16) + slot, inside, who, polls, error)
        tl.store(total, bits.to(tl.bfloat16, bitcast=True), inside)


@triton.jit
def _quantised(normed):
    """The bits of the FP8 row, with -0 for 0, and of its scales, which are never 0."""
    data, scale = quantise(normed.to(tl.float32))
    bits = data.to(tl.int8, bitcast=True)
    return tl.where(bits == 0, -128, bits).to(tl.int8), scale.to(tl.int32, bitcast=True)


@triton.jit(
    do_not_specialize=["num_rows", "scale_stride", "rank", "parts_at", "sums_at", "plain_at", "data_at", "scales_at"]
)
def two_shot(
    x, residual, weight, out, total, data, scales, bases, phases, polls, error,
    parts_at, sums_at, plain_at, data_at, scales_at,
    rank, num_rows, max_rows, width, eps, x_stride, residual_stride, scale_stride,
    SIZE: tl.constexpr, GROUPS: tl.constexpr, PLAIN: tl.constexpr, QUANT: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Row t has an owner, rank t % SIZE, which alone gets its parts, finishes it and sends the result to the others.

    Slots: parts int16 [2, SIZE, max_rows / SIZE, width], for row t the t / SIZE-th; sums, plain int16 and data int8
    [2, max_rows, width]; scales int32 [2, max_rows, GROUPS]. WHOLE: ranks want the sums of all rows.
    """
    groups = tl.arange(0, GROUPS)
    at = groups[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside, scaled = at < width, groups * 128 < width
    step = max_rows.to(tl.int64) * width
    part_step = (max_rows // SIZE).to(tl.int64) * width
    for number in range(tl.program_id(0), num_rows, tl.num_programs(0)):
        row = tl.cast(number, tl.int64)
        bits = _never_zero(tl.load(x + row * x_stride + at, inside, other=0.0))
        slot = (tl.load(phases + row) * SIZE + rank) * part_step + row // SIZE * width
        if number % SIZE != rank:
            tl.store(peer(bases, number % SIZE, parts_at, tl.int16) + slot + at, bits, inside)
    parts = peer(bases, rank, parts_at, tl.int16)
    gain = tl.load(weight + at, inside, other=0.0)
    for turn in tl.static_range(2):  # own rows first: others wait for them
        for number in range(tl.program_id(0), num_rows, tl.num_programs(0)):
            owner = number % SIZE
            if (owner == rank) == (turn == 0):
                row = tl.cast(number, tl.int64)
                phase = tl.load(phases + row)
                slot, scale_slot = phase * step + row * width + at, (phase * max_rows + row) * GROUPS + groups
                here = row * width + at
                scales_here = scales + groups.to(tl.int64) * scale_stride + row
                if turn == 0:
                    added = tl.load(residual + row * residual_stride + at, inside, other=0.0).to(tl.float32)
                    part = parts + phase * SIZE * part_step + row // SIZE * width
                    own = x + row * x_stride
                    summed = _sum(own, part, at, part_step, added, inside, rank, polls, error, SIZE)
                    normed = _normed(summed, gain, width, eps)
                    quant, scale = _quantised(normed)
                    summed, normed = _never_zero(summed), _never_zero(normed)
                    _send_result(
                        bases, rank, sums_at, plain_at, data_at, scales_at, slot, scale_slot, inside, scaled,
                        summed, normed, quant, scale, SIZE, PLAIN, QUANT, WHOLE,
                    )  # fmt: skip
                    tl.store(total + here, summed.to(tl.bfloat16, bitcast=True), inside)
                    if PLAIN:
                        tl.store(out + here, normed.to(tl.bfloat16, bitcast=True), inside)
                    if QUANT:
                        tl.store(data + here, quant.to(tl.float8e4nv, bitcast=True), inside)
                        tl.store(scales_here, scale.to(tl.float32, bitcast=True), scaled)
                else:
                    _take_result(
                        bases, rank, sums_at, plain_at, data_at, scales_at, slot, scale_slot, inside, scaled,
                        owner, polls, error, total + here, out + here, data + here, scales_here, PLAIN, QUANT, WHOLE,
                    )  # fmt: skip
                tl.store(phases + row, 1 - phase)
