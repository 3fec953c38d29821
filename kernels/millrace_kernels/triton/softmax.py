"""The running softmax of attention kernels, in base 2: scores come block by block and are already scaled by log2(e)."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def begin(BLOCK_M: tl.constexpr):
    """largest score and sum of weights so far, [M] each"""
    return tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32), tl.zeros((BLOCK_M,), dtype=tl.float32)


@triton.jit
def fold(scores, largest, total):
    """scores [M, N], -inf where a key is not seen -> weights [M, N], the factor of what was summed before, new state"""
    highest = tl.maximum(largest, tl.max(scores, axis=1))
    base = tl.where(highest == float("-inf"), 0.0, highest)  # -inf - -inf is NaN
    weights = tl.exp2(scores - base[:, None])
    fade = tl.exp2(largest - base)
    return weights, fade, highest, total * fade + tl.sum(weights, axis=1)


@triton.jit
def finish(out, largest, total):
    """out [M, D] normed and the natural log-sum-exp [M]; a row that saw no key has 0 and -inf"""
    seen = total > 0.0
    total = tl.where(seen, total, 1.0)
    return out / total[:, None], tl.where(seen, largest / LOG2E + tl.log(total), float("-inf"))
