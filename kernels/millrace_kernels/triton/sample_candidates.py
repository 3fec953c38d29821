"""The few tokens among which the bounds of top_k and top_p lie, so that their search need not walk over the vocabulary.

What filters keep is above some value; in a language model's rows that is some hundred tokens within a few nats of the
best. Three launches of a program per row and block of the vocabulary find them:

1. tops     the best of each block
2. levels   quarters of a nat below the row's best: how many tokens of the block are in each, and the block's mass
3. collect  the first level down to which is all that filters keep; the tokens down to it in the order of ids

Counts bound the mass below a level, so nothing is summed for each, and the level is a quarter of a nat too low at most.
Blocks are summed in their order: equal inputs give equal bits. A level down to which there are more than MOST tokens,
as in an almost flat row, is not collected.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK, WARPS = 8192, 16  # with 8 warps a program of `_collect` fills the registers of an SM
MOST = 16384
LEVELS = 64  # quarters of a nat, and the last: all that are allowed


class Candidates(NamedTuple):
    """Candidates of rows that are drawn with a filter; other rows are arbitrary."""

    values: Tensor  # float32 [S, MOST], logits / temperature
    sizes: Tensor  # int32 [S], how many there are; 0: none were collected
    tops: Tensor  # float32 [S], the best logit / temperature of the row
    masses: Tensor  # float64 [S], the sum of exp(y - top) over the whole row


def candidates(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, log_min_p: Tensor) -> Candidates:
    """logits float32 [S, V] and the parameters of `sample_tokens` for each row."""
    num, vocab = logits.shape
    blocks = triton.cdiv(vocab, BLOCK)
    given = (logits, temperature, top_k, top_p, log_min_p, logits.stride(0), vocab)

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=logits.device)

    best = empty(num, blocks)
    counts, mass = empty(num, LEVELS, blocks, dtype=torch.int32), empty(num, blocks, dtype=torch.float64)
    found = Candidates(empty(num, MOST), counts.new_empty(num), empty(num), mass.new_empty(num))
    sizes = {"BLOCK": BLOCK, "BLOCKS": triton.next_power_of_2(blocks), "LEVELS": LEVELS}
    grid = (num, blocks)
    _tops[grid](best, *given, BLOCK=BLOCK, num_warps=WARPS)
    _levels[grid](counts, mass, best, *given, **sizes, num_warps=WARPS)
    _collect[grid](*found, counts, mass, best, *given, **sizes, MOST=MOST, num_warps=WARPS)
    return found


@triton.jit
def scaled(x_row, ids, vocab, heat):
    """logits / temperature as the reference divides; -inf past the end."""
    x = tl.load(x_row + ids, ids < vocab, other=float("-inf"))
    return tl.div_rn(x, tl.broadcast_to(heat, x.shape))


@triton.jit
def weights(y, top):
    """exp(y - top), 0 for -inf even if that is the top."""
    return tl.where(y > float("-inf"), tl.exp(y - top), 0.0)


@triton.jit
def filters_of(row, temperature, top_k, top_p, log_min_p, vocab):
    """Temperature, k, p and log min_p of a row, whether k limits it, and whether anything is to be filtered."""
    heat, count, mass = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    floor = tl.load(log_min_p + row)
    limited = (count > 0) & (count < vocab)
    return heat, count, mass, floor, limited, (heat > 0.0) & (limited | (mass < 1.0) | (floor > float("-inf")))


@triton.jit
def _level(y, top, LEVELS: tl.constexpr):
    """int32: level n is for n / 4 to (n + 1) / 4 nats below the top, the upper end excluded, but for the top itself."""
    level = tl.ceil(tl.minimum((top - y) * 4.0, LEVELS)).to(tl.int32) - 1
    return tl.minimum(tl.maximum(level, 0), LEVELS - 1)


@triton.jit
def _tops(
    best, logits, temperature, top_k, top_p, log_min_p, stride, vocab, BLOCK: tl.constexpr
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    heat, _, _, _, _, filtered = filters_of(row, temperature, top_k, top_p, log_min_p, vocab)
    if filtered:
        y = scaled(logits + row.to(tl.int64) * stride, block * BLOCK + tl.arange(0, BLOCK), vocab, heat)
        tl.store(best + row * tl.num_programs(1) + block, tl.max(y, axis=0))


@triton.jit
def _row_top(best, row, BLOCKS: tl.constexpr):
    i = tl.arange(0, BLOCKS)
    return tl.max(tl.load(best + row * tl.num_programs(1) + i, i < tl.num_programs(1), other=float("-inf")), axis=0)


@triton.jit
def _levels(
    counts, mass, best, logits, temperature, top_k, top_p, log_min_p, stride, vocab,
    BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    heat, _, _, _, _, filtered = filters_of(row, temperature, top_k, top_p, log_min_p, vocab)
    if filtered:
        top = _row_top(best, row, BLOCKS)
        y = scaled(logits + row.to(tl.int64) * stride, block * BLOCK + tl.arange(0, BLOCK), vocab, heat)
        tl.store(mass + row * tl.num_programs(1) + block, tl.sum(weights(y, top).to(tl.float64), axis=0))
        count = tl.histogram(_level(y, top, LEVELS), LEVELS, mask=y > float("-inf"))
        tl.store(counts + (row * LEVELS + tl.arange(0, LEVELS)) * tl.num_programs(1) + block, count)


@triton.jit
def _collect(
    values, sizes, tops, masses, counts, mass, best, logits, temperature, top_k, top_p, log_min_p, stride,
    vocab, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, LEVELS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    row, block, blocks = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    heat, wanted, part, _, limited, filtered = filters_of(row, temperature, top_k, top_p, log_min_p, vocab)
    if filtered:
        i, levels = tl.arange(0, BLOCKS), tl.arange(0, LEVELS)
        top = _row_top(best, row, BLOCKS)
        at = (row * LEVELS + levels)[:, None] * blocks + i[None, :]
        count = tl.load(counts + at, (i < blocks)[None, :], other=0)
        total = tl.sum(tl.load(mass + row * blocks + i, i < blocks, other=0.0), axis=0)
        each = tl.sum(count, axis=1)
        most = each.to(tl.float32) * tl.exp(levels.to(tl.float32) * -0.25)  # mass of a level
        below = tl.sum(tl.where(levels[None, :] > levels[:, None], most[None, :], 0.0), axis=1)
        enough = tl.where(limited, tl.cumsum(each, axis=0) >= wanted, below <= (1.0 - part) * total.to(tl.float32))
        level = tl.min(tl.where(enough, levels, LEVELS - 1), axis=0)
        count = tl.sum(tl.where((levels <= level)[:, None], count, 0), axis=0)  # of each block
        size = tl.sum(count, axis=0)
        if block == 0:
            tl.store(sizes + row, tl.where(size <= MOST, size, 0))
            tl.store(tops + row, top)
            tl.store(masses + row, total)
        if (size <= MOST) & (tl.sum(tl.where(i == block, count, 0), axis=0) > 0):
            y = scaled(logits + row.to(tl.int64) * stride, block * BLOCK + tl.arange(0, BLOCK), vocab, heat)
            taken = (_level(y, top, LEVELS) <= level) & (y > float("-inf"))
            before = tl.sum(tl.where(i < block, count, 0), axis=0) + tl.cumsum(taken.to(tl.int32), axis=0) - 1
            tl.store(values + row.to(tl.int64) * MOST + before, y, taken)
