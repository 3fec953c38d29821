"""Which tokens top_k, top_p and min_p keep, without sorting.

Sorted by falling y, smaller ids first among equals, the kept tokens are a prefix: all with y above a value, and of
those equal to it the first few. A program per row searches the value over the bits of float32 as ordered integers,
PROBES at a time, each pass one walk over the row. Both ends of the interval move to values that occur, so a search ends
after some six passes. Sums have a fixed order: equal inputs give equal bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.triton.launch import options, wait

BLOCK, PROBES, WARPS = 4096, 8, 16


def bounds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [S] and int32 [S]: kept is y > value, and y == value up to and including id `last`. -inf and V where
    nothing is filtered.
    """
    num, vocab = logits.shape
    values = torch.empty(num, dtype=torch.float32, device=logits.device)
    lasts = torch.empty(num, dtype=torch.int32, device=logits.device)
    _bounds[(num,)](
        values, lasts, logits, temperature, top_k, top_p, min_p.log(), logits.stride(0), vocab,
        BLOCK=BLOCK, PROBES=PROBES, **options(WARPS),
    )  # fmt: skip
    return values, lasts


@triton.jit
def scaled(x_row, ids, vocab, heat):
    """logits / temperature as the reference divides; -inf past the end."""
    x = tl.load(x_row + ids, ids < vocab, other=float("-inf"))
    return tl.div_rn(x, tl.broadcast_to(heat, x.shape))


@triton.jit
def _ordered(y):
    """float32 -> int32 of the same order; 0 and -0 are one."""
    bits = tl.where(y == 0.0, 0.0, y).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _bounds(
    values, lasts, logits, temperature, top_k, top_p, log_min_p, stride, vocab,
    BLOCK: tl.constexpr, PROBES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    x_row = logits + row.to(tl.int64) * stride
    wait(PDL)
    heat, mass, floor = tl.load(temperature + row), tl.load(top_p + row), tl.load(log_min_p + row)
    count = tl.load(top_k + row)
    limited = (count > 0) & (count < vocab)
    if (heat > 0.0) & (limited | (mass < 1.0) | (floor > float("-inf"))):
        lowest, highest = _ends(x_row, heat, vocab, BLOCK)
        top = _value(highest)
        # top_k: without one, the lowest and all equal to it
        hi = tl.where(limited, highest, lowest)
        key = _search(x_row, heat, vocab, top, lowest, hi, count.to(tl.float32), True, BLOCK, PROBES)
        above, mass_above, equal = _around(x_row, heat, vocab, top, key, BLOCK)
        kept = tl.where(limited, tl.minimum(count.to(tl.int32) - above, equal), equal)
        # top_p: of what top_k leaves
        target = mass * (mass_above + _weights(_value(key), top) * kept.to(tl.float32))
        kth, hi = key, tl.where(mass < 1.0, highest, key)
        key = _search(x_row, heat, vocab, top, kth, hi, target, False, BLOCK, PROBES)
        if mass < 1.0:
            above, mass_above, equal = _around(x_row, heat, vocab, top, key, BLOCK)
            room = tl.where(key == kth, kept, equal).to(tl.float32)
            wanted = tl.ceil(tl.div_rn(target - mass_above, _weights(_value(key), top)))
            kept = tl.maximum(tl.minimum(wanted, room), 1.0).to(tl.int32)
        value = _value(key)
        last = vocab
        if kept < equal:
            last = _nth(x_row, heat, vocab, key, kept, BLOCK)
        higher = top + floor > value
        tl.store(values + row, tl.where(higher, top + floor, value))
        tl.store(lasts + row, tl.where(higher, vocab, last))
    else:
        tl.store(values + row, float("-inf"))
        tl.store(lasts + row, vocab)


@triton.jit
def _value(key):
    """What `_ordered` made the key of."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def _weights(y, top):
    """exp(y - top), 0 for -inf even if that is the top."""
    return tl.where(y > float("-inf"), tl.exp(y - top), 0.0)


@triton.jit
def _ends(x_row, heat, vocab, BLOCK: tl.constexpr):
    """int64, keys of the smallest and of the largest y"""
    low = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
    high = tl.full((BLOCK,), -0x80000000, tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        keys = _ordered(scaled(x_row, ids, vocab, heat))
        low = tl.minimum(low, tl.where(ids < vocab, keys, 0x7FFFFFFF))
        high = tl.maximum(high, keys)
    return tl.min(low, axis=0).to(tl.int64), tl.max(high, axis=0).to(tl.int64)


@triton.jit
def _search(
    x_row, heat, vocab, top, lo, hi, target, COUNT: tl.constexpr, BLOCK: tl.constexpr, PROBES: tl.constexpr
):  # fmt: skip
    """The smallest key in lo..hi above which there is less than `target` of tokens (COUNT) or of mass; hi has that."""
    while lo < hi:
        probes = (lo + (hi - lo) * tl.arange(0, PROBES) // PROBES).to(tl.int32)
        beyond = tl.zeros((PROBES, BLOCK), dtype=tl.float32)
        least = tl.full((BLOCK,), 0x7FFFFFFF, tl.int32)
        most = tl.full((BLOCK,), -0x80000000, tl.int32)
        for start in range(0, vocab, BLOCK):
            y = scaled(x_row, start + tl.arange(0, BLOCK), vocab, heat)
            keys = _ordered(y)
            if COUNT:
                beyond += tl.where(keys[None, :] > probes[:, None], 1.0, 0.0)
            else:
                beyond += tl.where(keys[None, :] > probes[:, None], _weights(y, top)[None, :], 0.0)
            least = tl.minimum(least, tl.where(keys >= lo, keys, 0x7FFFFFFF))
            most = tl.maximum(most, tl.where(keys <= hi, keys, -0x80000000))
        enough = tl.sum(beyond, axis=1) < target
        below = tl.max(tl.where(enough, lo, probes.to(tl.int64) + 1), axis=0)
        found = tl.min(tl.where(enough, probes.to(tl.int64), hi), axis=0)
        lo = tl.maximum(below, tl.min(least, axis=0).to(tl.int64))
        hi = tl.minimum(found, tl.max(most, axis=0).to(tl.int64))
    return hi


@triton.jit
def _around(x_row, heat, vocab, top, key, BLOCK: tl.constexpr):
    """How many tokens are above the key, their mass, and how many are equal to it."""
    above = tl.zeros((BLOCK,), dtype=tl.int32)
    mass = tl.zeros((BLOCK,), dtype=tl.float32)
    equal = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        y = scaled(x_row, ids, vocab, heat)
        keys = _ordered(y)
        above += (keys > key).to(tl.int32)
        mass += tl.where(keys > key, _weights(y, top), 0.0)
        equal += ((keys == key) & (ids < vocab)).to(tl.int32)
    return tl.sum(above, axis=0), tl.sum(mass, axis=0), tl.sum(equal, axis=0)


@triton.jit
def _nth(x_row, heat, vocab, key, wanted, BLOCK: tl.constexpr):
    """The id of the `wanted`-th of the tokens equal to the key."""
    seen = wanted * 0
    found = vocab
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        equal = (_ordered(scaled(x_row, ids, vocab, heat)) == key) & (ids < vocab)
        order = seen + tl.cumsum(equal.to(tl.int32), axis=0)
        found = tl.minimum(found, tl.min(tl.where(equal & (order == wanted), ids, vocab), axis=0))
        seen += tl.sum(equal.to(tl.int32), axis=0)
    return found
