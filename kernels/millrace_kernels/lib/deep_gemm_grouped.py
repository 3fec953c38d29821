"""FP8 experts through DeepGEMM's grouped GEMMs, for all token counts at which quantising the activations pays.

    quantise x once per token -> rows to experts -> w13 -> SwiGLU and quantise -> w2 -> weighted sum per token

DeepGEMM gets the end of each expert's rows: room that no row fills costs neither memory nor time.
"""

import torch
from torch import Tensor

from millrace_kernels.fp8 import Fp8, Operand
from millrace_kernels.moe_experts import expected_rows
from millrace_kernels.moe_masked import BLOCK_ROWS
from millrace_kernels.triton import moe_masked as masked
from millrace_kernels.triton.moe_grouped import rows_for
from millrace_kernels.triton.moe_route import route, slices
from millrace_kernels.triton.moe_rows import combine, permute, silu_mul_quant

L2_BYTES = 50 << 20


def moe_experts_fp8(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Fp8, w2: Fp8,
    *, shared_expert: bool = False, num_experts: int = 0, out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    rows, dtype = rows_for(x, w13)
    (num, dim), num_held, top_k = rows.data.shape, w13.data.shape[0], experts.shape[1]
    out = torch.empty(num, dim, dtype=dtype, device=rows.data.device) if out is None else out
    for first, last in slices(num, top_k + shared_expert):
        expected = expected_rows(last - first, top_k, num_experts or num_held - shared_expert)
        part = Fp8(rows.data[first:last], rows.scales[first:last])
        chosen = experts[first:last], weights[first:last]
        _one_pass(part, *chosen, w13, w2, out[first:last], shared_expert, expected)
    return out


def _one_pass(
    x: Fp8, experts: Tensor, weights: Tensor, w13: Fp8, w2: Fp8, out: Tensor, shared_expert: bool, expected: int
) -> None:
    num_held, width, dim = w13.data.shape
    alignment = tile_rows(expected)
    plan, blocks = route(experts, num_held, shared_expert, alignment)
    x_bytes, y_bytes = plan.num_rows * dim, 2 * plan.num_rows * dim
    # What w2 writes lies over what w13 read and wrote.
    scratch = torch.empty(max(x_bytes + 2 * plan.num_rows * width, y_bytes), dtype=torch.uint8, device=out.device)
    permuted = scratch[:x_bytes].view(torch.float8_e4m3fn).view(plan.num_rows, dim)
    gate_up = scratch[x_bytes : x_bytes + 2 * plan.num_rows * width].view(torch.bfloat16).view(plan.num_rows, width)
    y = scratch[:y_bytes].view(torch.bfloat16).view(plan.num_rows, dim)

    rows = permute(x, plan, blocks.tokens, permuted, stream=x_bytes > L2_BYTES)
    _grouped_gemm(rows, w13, gate_up, plan.ends, alignment, expected)
    _grouped_gemm(silu_mul_quant(gate_up, plan), w2, y, plan.ends, alignment, expected)
    combine(y, plan, weights, out)


def tile_rows(expected: int) -> int:
    """Rows of a GEMM's tile, which never holds rows of two experts, by the rows of an expert, a power of two.

    Tiles of 256 rows take 3 % less time than tiles of 128: 7,014 and 3,795 us on an H200 for w13 and w2 of 33 experts
    with 147,456 rows, not 7,230 and 3,915. But each expert pays for 64 more unused rows on average: 1.6 % of 4,096
    rows, and all that was won at 2,049, the fewest that are expected to be 4,096.
    """
    return 64 if expected <= 64 else 128 if expected < 4096 else 256


def _grouped_gemm(x: Fp8, weight: Fp8, out: Tensor, ends: Tensor, alignment: int, expected: int) -> None:
    import deep_gemm

    deep_gemm.set_mk_alignment_for_contiguous_layout(alignment)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        tuple(x), tuple(weight), out, ends, use_psum_layout=True, expected_m_for_psum_layout=expected
    )


def moe_masked(x: Fp8, counts: Tensor, w13: Fp8, w2: Fp8, expected: int) -> Tensor:
    """w13 -> SwiGLU and quantise -> w2, on rows that are sorted by expert."""
    return _masked_gemm(masked.silu_mul_quant(_masked_gemm(x, counts, w13, expected), counts), counts, w2, expected)


def _masked_gemm(x: Fp8, counts: Tensor, weight: Fp8, expected: int) -> Tensor:
    import deep_gemm

    held, most, _ = x.data.shape
    assert most % BLOCK_ROWS == 0, most
    out = torch.empty(held, most, weight.data.shape[1], dtype=torch.bfloat16, device=counts.device)
    deep_gemm.fp8_m_grouped_gemm_nt_masked(tuple(x), tuple(weight), out, counts, min(expected, most))
    return out
