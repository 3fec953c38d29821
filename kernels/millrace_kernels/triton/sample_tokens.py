"""Sampling in two launches, and five more with filters, whatever V is.

1. bounds   only with filters (`sample_filter.py`): a row's kept tokens are those above a value, and the first few equal
            to it
2. draw     a program per row and block: its best token. Noise is estimated in float32 for every token, and computed as
            the reference does, in float64, for the one or two whose estimate may win
3. best     a program per row: the best of its blocks, the smallest id of equals
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.sample_tokens import SampleParams
from millrace_kernels.triton.sample_candidates import scaled
from millrace_kernels.triton.sample_filter import bounds

BLOCK = 1024  # tokens of a program


def sample_tokens(logits: Tensor, params: SampleParams, output_index: Tensor, *, draws: bool, filters: bool) -> Tensor:
    assert logits.dtype == torch.float32 and logits.stride(1) == 1, (logits.dtype, logits.stride())
    num, vocab = logits.shape
    tokens = torch.empty(num, dtype=torch.int64, device=logits.device)
    if not num:
        return tokens
    filters = draws and filters
    blocks = triton.cdiv(vocab, BLOCK)
    scores = torch.empty(num, blocks, dtype=torch.float32, device=logits.device)
    ids = torch.empty(num, blocks, dtype=torch.int32, device=logits.device)
    values, lasts = bounds(logits, *params[:4]) if filters else (scores, ids)  # these: not read
    _draw[(num, blocks)](
        scores, ids, logits, params.temperature, values, lasts, params.seeds, output_index,
        logits.stride(0), vocab, int(filters), BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    _best[(num,)](tokens, scores, ids, blocks, BLOCKS=triton.next_power_of_2(blocks), num_warps=1)
    return tokens


@triton.jit
def mix32(x):
    """Bijection of uint32 (finalizer of MurmurHash3)."""
    x = (x ^ (x >> 16)) * 0x85EBCA6B
    x = (x ^ (x >> 13)) * 0xC2B2AE35
    return x ^ (x >> 16)


@triton.jit
def _row_key(seed, position):
    key = mix32(mix32(seed.to(tl.uint32)) ^ (seed >> 32).to(tl.uint32))
    return mix32(key ^ mix32(position.to(tl.uint32)))


@triton.jit
def _bits(key, ids):
    return mix32(mix32(key ^ mix32(ids.to(tl.uint32))) + key)


@triton.jit
def _noise(bits):
    """-log(-log u), rounded from float64."""
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return -(tl.log(-tl.log(uniform)).to(tl.float32))


@triton.jit
def _estimated_noise(bits):
    """Within 2^-9 of _noise. Near u = 1 the outer logarithm magnifies what the inner one rounds, so there it is the
    series of -log(1 - c).
    """
    uniform = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((bits ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    inner = tl.where(rest < 0.001, rest * (1.0 + 0.5 * rest), -tl.log(tl.minimum(uniform, 0.9999)))
    return -tl.log(inner)


@triton.jit(do_not_specialize=["filters"])  # a profiling run compiles it for every batch
def _draw(
    scores, best_ids, logits, temperature, values, lasts, seeds, output_index, stride, vocab, filters,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row, block = tl.program_id(0), tl.program_id(1)
    ids = block * BLOCK + tl.arange(0, BLOCK)
    x_row = logits + row.to(tl.int64) * stride
    heat = tl.load(temperature + row)
    drawn = heat > 0.0
    y = scaled(x_row, ids, vocab, tl.where(drawn, heat, 1.0))
    value = tl.load(values + row, filters != 0, other=float("-inf"))
    last = tl.load(lasts + row, filters != 0, other=0x7FFFFFFF)
    y = tl.where((y > value) | ((y == value) & (ids <= last)), y, float("-inf"))
    top = tl.max(y, axis=0)
    best = top
    best_id = tl.min(tl.where(y == top, ids, 0x7FFFFFFF), axis=0)
    if drawn & (top > float("-inf")):
        best, best_id = _best_of_block(y, ids, best_id, tl.load(seeds + row), tl.load(output_index + row))
    where = row * tl.num_programs(1) + block
    tl.store(scores + where, best)
    tl.store(best_ids + where, best_id)


@triton.jit
def _best_of_block(y, ids, some_id, seed, position):
    """Largest y + noise, exactly, and the smallest id that has it. Candidates are taken in the order of estimates."""
    key = _row_key(seed, position)
    estimates = y + _estimated_noise(_bits(key, ids))
    top = tl.max(estimates, axis=0)
    margin = 0.008 + tl.abs(top) * 1e-6  # twice the error of an estimate, and the rounding of sums
    cutoff = tl.where(top == float("inf"), top, top - margin)
    best = tl.full([], float("-inf"), tl.float32)
    best_id = some_id
    while top >= cutoff:
        at = tl.min(tl.where(estimates == top, ids, 0x7FFFFFFF), axis=0)
        value = tl.max(tl.where(ids == at, y, float("-inf")), axis=0) + _noise(_bits(key, at))
        better = (value > best) | ((value == best) & (at < best_id))
        best = tl.where(better, value, best)
        best_id = tl.where(better, at, best_id)
        estimates = tl.where(ids == at, float("-inf"), estimates)
        top = tl.max(estimates, axis=0)
    return best, best_id


@triton.jit
def _best(tokens_ptr, scores, ids, blocks, BLOCKS: tl.constexpr):
    row, block = tl.program_id(0), tl.arange(0, BLOCKS)
    score = tl.load(scores + row * blocks + block, block < blocks, other=float("-inf"))
    best_id = tl.load(ids + row * blocks + block, block < blocks, other=0x7FFFFFFF)
    top = tl.max(score, axis=0)
    token = tl.min(tl.where(score == top, best_id, 0x7FFFFFFF), axis=0)
    tl.store(tokens_ptr + row, tl.where(token == 0x7FFFFFFF, 0, token).to(tl.int64))
