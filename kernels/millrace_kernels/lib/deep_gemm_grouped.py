"""FP8 experts through DeepGEMM's grouped GEMMs, for all token counts at which quantising the activations pays.

    quantise x once per token -> rows to experts -> w13 -> SwiGLU and quantise -> w2 -> weighted sum per token

DeepGEMM has three ways to say which rows are whose, and each is an implementation of the op: `packed` (where each
expert's rows end), `indexed` (whose every row is) and `padded` (as much room for every expert, and how much of it is
used). The first wastes neither memory nor, for room that nobody fills, time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from millrace_kernels.fp8 import Fp8, Operand, quant_groups
from millrace_kernels.moe_experts import expected_rows
from millrace_kernels.triton.moe_route import Blocks, Route, route, slices
from millrace_kernels.triton.moe_rows import combine, permute, silu_mul_quant

L2_BYTES = 50 << 20


class Pass(NamedTuple):
    """One pass over a slice of the tokens."""

    route: Route
    blocks: Blocks | None
    alignment: int  # rows of a GEMM's tile: no tile holds the rows of two experts
    expected_rows: int  # of one expert, on average


Layout = Callable[[Tensor, int, bool, int], Pass]  # experts, E, shared_expert, expected rows
Gemm = Callable[[Fp8, Fp8, Tensor, Pass], None]  # rows, weights, out


def packed(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Fp8, w2: Fp8,
    *, shared_expert: bool = False, num_experts: int = 0,
) -> Tensor:  # fmt: skip
    run = (_packed_layout, _packed_gemm)
    return _moe(*run, x, weights, experts, w13, w2, shared_expert, num_experts)


def indexed(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Fp8, w2: Fp8,
    *, shared_expert: bool = False, num_experts: int = 0,
) -> Tensor:  # fmt: skip
    run = (_indexed_layout, _indexed_gemm)
    return _moe(*run, x, weights, experts, w13, w2, shared_expert, num_experts)


def padded(
    x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Fp8, w2: Fp8,
    *, shared_expert: bool = False, num_experts: int = 0,
) -> Tensor:  # fmt: skip
    run = (_padded_layout, _padded_gemm)
    return _moe(*run, x, weights, experts, w13, w2, shared_expert, num_experts)


def _packed_layout(experts: Tensor, num_held: int, shared: bool, expected: int) -> Pass:
    alignment = packed_alignment(expected)
    return Pass(*route(experts, num_held, shared, alignment), alignment, expected)


def packed_alignment(expected: int) -> int:
    """By the rows of an expert, a power of two.

    Tiles of 256 rows take 3 % less time than tiles of 128: 7,014 and 3,795 us on an H200 for w13 and w2 of 33 experts
    with 147,456 rows, not 7,230 and 3,915. But each expert pays for 64 more rows of nobody on average: 1.6 % of 4,096
    rows, and all that was won at 2,049, the fewest that are expected to be 4,096.
    """
    return 64 if expected <= 64 else 128 if expected < 4096 else 256


def _packed_gemm(x: Fp8, weight: Fp8, out: Tensor, plan: Pass) -> None:
    import deep_gemm

    deep_gemm.set_mk_alignment_for_contiguous_layout(plan.alignment)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
        tuple(x),
        tuple(weight),
        out,
        plan.route.ends,
        use_psum_layout=True,
        expected_m_for_psum_layout=plan.expected_rows,
    )


def _indexed_layout(experts: Tensor, num_held: int, shared: bool, expected: int) -> Pass:
    return Pass(*route(experts, num_held, shared, 128, granularity=1), 128, expected)


def _indexed_gemm(x: Fp8, weight: Fp8, out: Tensor, plan: Pass) -> None:
    import deep_gemm

    assert plan.blocks is not None
    deep_gemm.set_mk_alignment_for_contiguous_layout(plan.alignment)
    deep_gemm.m_grouped_fp8_gemm_nt_contiguous(tuple(x), tuple(weight), out, plan.blocks.experts)


def _padded_layout(experts: Tensor, num_held: int, shared: bool, expected: int) -> Pass:
    room = -(-experts.shape[0] // 128) * 128  # a token has one row of an expert at most
    return Pass(*route(experts, num_held, shared, 128, group_rows=room), 128, expected)


def _padded_gemm(x: Fp8, weight: Fp8, out: Tensor, plan: Pass) -> None:
    import deep_gemm

    counts = plan.route.counts
    groups, room = counts.shape[0], plan.route.group_rows
    data, scales = x.data.view(groups, room, -1), x.scales.view(groups, room, -1) if groups == 1 else x.scales
    deep_gemm.fp8_m_grouped_gemm_nt_masked(
        (data, scales), tuple(weight), out.view(groups, room, -1), counts, plan.expected_rows
    )


def _moe(
    layout: Layout, gemm: Gemm, x: Tensor | Operand, weights: Tensor, experts: Tensor, w13: Fp8, w2: Fp8,
    shared_expert: bool, num_experts: int,
) -> Tensor:  # fmt: skip
    plain, fp8 = x if isinstance(x, Operand) else (x, None)
    if fp8 is None:
        assert plain is not None, "an operand without any form"
        fp8 = quant_groups(plain)
    (num, dim), (num_held, _, _), top_k = fp8.data.shape, w13.data.shape, experts.shape[1]
    dtype = torch.bfloat16 if plain is None else plain.dtype
    out = torch.empty(num, dim, dtype=dtype, device=fp8.data.device)
    held = num_experts or num_held - shared_expert
    for first, last in slices(num, top_k + shared_expert):
        expected = expected_rows(last - first, top_k, held)
        plan = layout(experts[first:last], num_held, shared_expert, expected)
        rows = Fp8(fp8.data[first:last], fp8.scales[first:last])
        _one_pass(plan, gemm, rows, weights[first:last], w13, w2, out[first:last])
    return out


def _one_pass(plan: Pass, gemm: Gemm, x: Fp8, weights: Tensor, w13: Fp8, w2: Fp8, out: Tensor) -> None:
    num_rows, (_, width, dim) = plan.route.num_rows, w13.data.shape
    x_bytes, y_bytes = num_rows * dim, 2 * num_rows * dim
    # What w2 writes lies over what w13 read and wrote.
    scratch = torch.empty(max(x_bytes + 2 * num_rows * width, y_bytes), dtype=torch.uint8, device=out.device)
    permuted = scratch[:x_bytes].view(torch.float8_e4m3fn).view(num_rows, dim)
    gate_up = scratch[x_bytes : x_bytes + 2 * num_rows * width].view(torch.bfloat16).view(num_rows, width)
    y = scratch[:y_bytes].view(torch.bfloat16).view(num_rows, dim)

    gemm(permute(x, plan.route, permuted, stream=x_bytes > L2_BYTES), w13, gate_up, plan)
    gemm(silu_mul_quant(gate_up, plan.route), w2, y, plan)
    combine(y, plan.route, weights, out)
