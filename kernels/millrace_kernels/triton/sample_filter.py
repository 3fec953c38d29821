"""The tokens that top_k, top_p and min_p keep, without sorting.

Sorted by falling y, smaller ids first among equals, the kept tokens are a prefix: all with y above a value, and of
those equal to it the first few. A program per row searches the value, among the row's candidates (sample_candidates.py)
or, by a second launch, among all where those are too many: over the bits of float32 as ordered integers, PROBES at a
time, each pass one walk. Both ends of the interval move to values that occur, so a search ends after some six passes.
Sums have a fixed order: equal inputs give equal bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.triton.sample_candidates import candidates, filters_of, scaled, weights

PROBES = 8
BLOCKS = {True: (2048, 8), False: (4096, 16)}  # tokens of a step and warps, among candidates and among all


def bounds(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [S] and int32 [S]: kept is y > value, and y == value up to and including id `last`. -inf and V where
    nothing is filtered.
    """
    rows = (logits, temperature, top_k, top_p, min_p.log())
    found = candidates(*rows)
    values, lasts = torch.empty_like(found.tops), torch.empty_like(found.sizes)
    given = (*rows, logits.stride(0), logits.shape[1])
    for few, (block, warps) in BLOCKS.items():
        _bounds[found.sizes.shape](
            values, lasts, *found, *given, MOST=found.values.shape[1], FEW=few, BLOCK=block, PROBES=PROBES,
            num_warps=warps,
        )  # fmt: skip
    return values, lasts


@triton.jit
def _ordered(y):
    """float32 -> int32 of the same order; 0 and -0 are one."""
    bits = tl.where(y == 0.0, 0.0, y).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _bounds(
    values, lasts, found, sizes, tops, masses, logits, temperature, top_k, top_p, log_min_p, stride, vocab,
    MOST: tl.constexpr, FEW: tl.constexpr, BLOCK: tl.constexpr, PROBES: tl.constexpr,
):  # fmt: skip
    """FEW: of all rows but those to be searched that have no candidates."""
    row = tl.program_id(0)
    heat, count, part, floor, limited, filtered = filters_of(row, temperature, top_k, top_p, log_min_p, vocab)
    searched = filtered & (limited | (part < 1.0))
    size = tl.load(sizes + row, searched, other=1)
    if (size > 0) == FEW:
        value, last = float("-inf"), vocab
        if filtered:
            top = tl.load(tops + row)
            if searched:
                whole = logits + row.to(tl.int64) * stride
                if FEW:  # which are divided already
                    x_row, by, length = found + row.to(tl.int64) * MOST, tl.full([], 1.0, tl.float32), size
                else:
                    x_row, by, length = whole, heat, vocab
                lowest, highest = _ends(x_row, by, length, BLOCK)
                # top_k: without one, the lowest and all equal to it
                key, target = lowest, part.to(tl.float64) * tl.load(masses + row)
                kept, equal = vocab, vocab
                if limited:
                    key = _search(x_row, by, length, top, lowest, highest, count.to(tl.float32), True, BLOCK, PROBES)
                    above, mass_above, equal = _around(x_row, by, length, top, key, BLOCK)
                    kept = tl.minimum(count.to(tl.int32) - above, equal)
                    target = part.to(tl.float64) * (mass_above + weights(_value(key), top) * kept.to(tl.float64))
                # top_p: of the tokens that top_k keeps
                if part < 1.0:
                    kth = key
                    key = _search(x_row, by, length, top, kth, highest, target.to(tl.float32), False, BLOCK, PROBES)
                    above, mass_above, equal = _around(x_row, by, length, top, key, BLOCK)
                    room = tl.where(key == kth, tl.minimum(kept, equal), equal).to(tl.float32)
                    rest = (target - mass_above).to(tl.float32)
                    wanted = tl.ceil(tl.div_rn(rest, weights(_value(key), top)))
                    kept = tl.maximum(tl.minimum(wanted, room), 1.0).to(tl.int32)
                value = _value(key)
                if kept < equal:
                    last = _nth(whole, heat, vocab, key, kept, BLOCK)
            if top + floor > value:
                value, last = top + floor, vocab
        tl.store(values + row, value)
        tl.store(lasts + row, last)


@triton.jit
def _value(key):
    """The inverse of `_ordered`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


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
                beyond += tl.where(keys[None, :] > probes[:, None], weights(y, top)[None, :], 0.0)
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
    """The number of tokens above the key, their mass, and the number of tokens equal to it. The mass is a float64: its
    distance from a target gives the number of further kept tokens.
    """
    above = tl.zeros((BLOCK,), dtype=tl.int32)
    mass = tl.zeros((BLOCK,), dtype=tl.float64)
    equal = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in range(0, vocab, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        y = scaled(x_row, ids, vocab, heat)
        keys = _ordered(y)
        above += (keys > key).to(tl.int32)
        mass += tl.where(keys > key, weights(y, top), 0.0).to(tl.float64)
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
