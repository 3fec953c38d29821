"""INT8 product on the tensor cores, and the quantisation of rows: one program a row, which it reads once.

The weight is the left operand, as in `fp8_linear`: wgmma takes 64 of its rows at a time, and as many tokens as there
are. Sums are INT32; with scales by block those of 128 columns, added up in FP32. The experts' products are the same
kernel: it gathers the rows of blocks that `moe_route` made, each for one expert.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.fp8 import Operand
from millrace_kernels.int8 import Int8, quant_like
from millrace_kernels.moe_experts import expected_rows, plain_rows
from millrace_kernels.silu_mul import silu_mul
from millrace_kernels.triton.moe_route import route, slices
from millrace_kernels.triton.moe_rows import combine


class Int8LinearConfig(NamedTuple):
    block_m: int  # tokens
    block_n: int  # rows of the weight
    warps: int
    stages: int


# By the tokens up to which they hold. Not measured.
CONFIGS = {
    16: Int8LinearConfig(16, 64, 4, 5),
    64: Int8LinearConfig(64, 64, 4, 5),
    256: Int8LinearConfig(128, 64, 4, 4),
    1 << 62: Int8LinearConfig(128, 128, 8, 4),
}
BLOCK_K = 128
GROUP = 8  # tiles of tokens that share rows of the weight while those are in the L2 cache


@triton.jit
def _quant_rows(x, data, scales, width, x_stride, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.arange(0, WIDTH)
    values = tl.load(x + row * x_stride + cols, cols < width, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=0)
    scale = tl.where(largest > 0, tl.div_rn(largest, 127.0), 1.0)
    scaled = tl.div_rn(values, tl.broadcast_to(scale, values.shape))
    nearest = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: float32 has no fraction there
    tl.store(data + row * width + cols, nearest.to(tl.int8), cols < width)
    tl.store(scales + row, scale)


@triton.jit(do_not_specialize=["num_tokens"])
def _int8_product(
    x, x_scales, weight, w_scales, out, tokens_ptr, blocks_ptr, ends_ptr, total_ptr,
    num_tokens, n, k, x_stride, weight_stride, groups, weight_size, scales_size,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr,
    BY_BLOCK: tl.constexpr,
):  # fmt: skip
    """With blocks_ptr the rows are those of experts, whose weights and scales lie weight_size and scales_size apart;
    tokens_ptr, if any, says which row of x each of them is. groups: scales of a row of x, with BY_BLOCK.
    """
    tiles_m, tiles_n = tl.cdiv(num_tokens, BLOCK_M), tl.cdiv(n, BLOCK_N)
    tile_m, tile_n = tl.swizzle2d(tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n, tiles_m, tiles_n, GROUP)
    tokens, rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M), tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    out_at = out + tokens.to(tl.int64)[:, None] * n + rows[None, :]
    end = num_tokens
    if blocks_ptr is not None:
        used = tile_m * BLOCK_M < tl.load(total_ptr)
        expert = tl.load(blocks_ptr + tile_m, used, other=0).to(tl.int64)
        end = tl.where(used, tl.load(ends_ptr + expert), 0)
        weight += expert * weight_size
        w_scales += expert * scales_size
    some, held, at = tokens < end, rows < n, tl.arange(0, BLOCK_K)
    source = tokens.to(tl.int64)
    if tokens_ptr is not None:
        source = tl.load(tokens_ptr + tokens, some, other=0).to(tl.int64)
    x_at, w_at = x + source[:, None] * x_stride, weight + rows.to(tl.int64)[:, None] * weight_stride
    total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32 if BY_BLOCK else tl.int32)
    for first in tl.range(0, tl.where(end > tile_m * BLOCK_M, k, 0), BLOCK_K, num_stages=STAGES):
        inside = (first + at < k)[None, :]
        inputs = tl.load(x_at + first + at[None, :], some[:, None] & inside, other=0)
        values = tl.load(w_at + first + at[None, :], held[:, None] & inside, other=0)
        if BY_BLOCK:
            part = tl.dot(values, tl.trans(inputs), out_dtype=tl.int32)
            x_scale = tl.load(x_scales + source * groups + first // BLOCK_K, some, other=0.0)
            w_scale = tl.load(w_scales + rows // BLOCK_K * groups + first // BLOCK_K, held, other=0.0)
            total += part.to(tl.float32) * w_scale[:, None] * x_scale[None, :]
        else:
            total = tl.dot(values, tl.trans(inputs), total, out_dtype=tl.int32)
    if BY_BLOCK:
        result = tl.trans(total)
    else:
        x_scale = tl.load(x_scales + source, some, other=0.0)
        w_scale = tl.load(w_scales + rows, held, other=0.0)
        result = tl.trans(total.to(tl.float32) * w_scale[:, None] * x_scale[None, :])
    tl.store(out_at, result.to(out.dtype.element_ty), (tokens < num_tokens)[:, None] & held[None, :])


def quant_rows(x: Tensor) -> Int8:
    assert x.stride(1) == 1, x.stride()
    num_tokens, width = x.shape
    data = torch.empty(num_tokens, width, dtype=torch.int8, device=x.device)
    scales = torch.empty(num_tokens, dtype=torch.float32, device=x.device)
    if num_tokens:
        padded = triton.next_power_of_2(width)
        warps = max(1, min(16, padded // 1024))
        _quant_rows[(num_tokens,)](x, data, scales, width, x.stride(0), WIDTH=padded, num_warps=warps)
    return Int8(data, scales)


def int8_linear(x: Int8, weight: Int8, dtype: torch.dtype, chosen: Int8LinearConfig | None = None) -> Tensor:
    num_tokens = len(x.data)
    chosen = chosen or CONFIGS[min(most for most in CONFIGS if num_tokens <= most)]
    out = torch.empty(num_tokens, weight.data.shape[0], dtype=dtype, device=x.data.device)
    if num_tokens:
        _product(x, weight, out, chosen, None, None, None, None)
    return out


def moe_experts_int8(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Int8, w2: Int8,
    *, shared_expert: bool = False, num_experts: int = 0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rows are quantised once for all experts that read them; gate, up and SwiGLU pass through memory."""
    rows, held = plain_rows(x), w13.data.shape[0]
    out = torch.empty_like(rows, memory_format=torch.contiguous_format) if out is None else out
    expected = expected_rows(experts.shape[0], experts.shape[1], num_experts or held - shared_expert)
    chosen, data = CONFIGS[min(most for most in CONFIGS if expected <= most)], quant_like(rows, w13)
    for first, last in slices(experts.shape[0], experts.shape[1] + shared_expert):
        plan, blocks = route(experts[first:last], held, shared_expert, chosen.block_m)
        part = blocks.experts, plan.ends, plan.total
        up = rows.new_empty(plan.num_rows, w13.data.shape[1])
        _product(Int8(data.data[first:last], data.scales[first:last]), w13, up, chosen, blocks.tokens, *part)
        h = silu_mul(up).plain
        assert h is not None
        y = rows.new_empty(plan.num_rows, rows.shape[1])
        _product(quant_like(h, w2), w2, y, chosen, None, *part)
        combine(y, plan, weights[first:last], out[first:last])
    return out


def _product(
    x: Int8, weight: Int8, out: Tensor, chosen: Int8LinearConfig,
    tokens: Tensor | None, blocks: Tensor | None, ends: Tensor | None, total: Tensor | None,
) -> None:  # fmt: skip
    num_tokens, n = out.shape
    k = weight.data.shape[-1]
    assert x.data.stride(1) == weight.data.stride(-1) == 1, (x.data.stride(), weight.data.stride())
    assert x.scales.is_contiguous() and weight.scales.is_contiguous(), (x.scales.stride(), weight.scales.stride())
    _int8_product[(triton.cdiv(num_tokens, chosen.block_m) * triton.cdiv(n, chosen.block_n),)](
        x.data, x.scales, weight.data, weight.scales, out, tokens, blocks, ends, total, num_tokens, n, k,
        x.data.stride(0), weight.data.stride(-2), triton.cdiv(k, BLOCK_K), weight.data.stride(0),
        weight.scales.stride(0), BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, BLOCK_K=BLOCK_K, GROUP=GROUP,
        STAGES=chosen.stages, BY_BLOCK=weight.by_block, num_warps=chosen.warps,
    )  # fmt: skip
