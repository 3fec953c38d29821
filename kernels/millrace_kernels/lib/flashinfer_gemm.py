"""FlashInfer's dense FP8 products with block scales: that of TensorRT-LLM for sm90, to compare with DeepGEMM and ours;
and for Blackwell, where nobody has run them with this project yet, CUTLASS and TensorRT-LLM.

The one for sm90 runs nvcc at the first call of a shape, for a fork of DeepGEMM that swaps the operands below 32 tokens;
TRTLLM_DG_CACHE_DIR, else ~/.tensorrt_llm, keeps what it compiles. With TRTLLM_DG_ENABLED=0 in the environment at the
call it is a kernel of CUTLASS. Both read scales without their strides. Shapes, dtypes and layouts that a product does
not take are ours.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8
from millrace_kernels.triton import fp8_linear as ours


def fp8_linear_sm90(x: Fp8, weight: Fp8, dtype: torch.dtype) -> Tensor:
    if not _takes(weight, dtype, 64) or x.scales.stride() != (1, -(-x.data.shape[0] // 4) * 4):
        return ours.fp8_linear(x, weight, dtype)
    from flashinfer.gemm import fp8_blockscale_gemm_sm90

    out = torch.empty(x.data.shape[0], weight.data.shape[0], dtype=dtype, device=x.data.device)
    if len(out):
        fp8_blockscale_gemm_sm90(x.data, weight.data, x.scales, weight.scales, out)
    return out


def fp8_linear_cutlass(x: Fp8, weight: Fp8, dtype: torch.dtype) -> Tensor:
    rows = _whole_fours(x)
    return _blackwell(x, weight, dtype, rows.data, rows.scales.contiguous(), weight.scales, "K", "cutlass")


def fp8_linear_trtllm(x: Fp8, weight: Fp8, dtype: torch.dtype) -> Tensor:
    rows = _whole_fours(x)
    by_column = rows.scales.t().contiguous().t()
    return _blackwell(x, weight, dtype, rows.data, by_column, weight.scales.t(), None, "trtllm")


def _blackwell(
    x: Fp8, weight: Fp8, dtype: torch.dtype, rows: Tensor, x_scales: Tensor, w_scales: Tensor, major: str | None,
    backend: str,
) -> Tensor:  # fmt: skip
    """rows and scales in the layout of the backend; x is what our kernel takes instead."""
    if not len(rows) or not _takes(weight, dtype, BLOCK) or x.data.shape[1] < 2 * BLOCK:
        return ours.fp8_linear(x, weight, dtype)
    from flashinfer.gemm import gemm_fp8_nt_groupwise

    out = gemm_fp8_nt_groupwise(
        rows, weight.data, x_scales, w_scales, scale_major_mode=major, out_dtype=dtype, backend=backend
    )
    return out[: x.data.shape[0]]


def _takes(weight: Fp8, dtype: torch.dtype, rows: int) -> bool:
    """Whether the weight has whole blocks of K, and of N a multiple of `rows`, and lies with its scales row by row."""
    n, k = weight.data.shape
    in_rows = weight.data.is_contiguous() and weight.scales.is_contiguous()
    return dtype == torch.bfloat16 and n % rows == 0 and k % BLOCK == 0 and in_rows


def _whole_fours(x: Fp8) -> Fp8:
    """With as many rows of zeros behind as make their number a multiple of 4."""
    missing = -x.data.shape[0] % 4
    if not missing:
        return x
    data = F.pad(x.data.view(torch.uint8), (0, 0, 0, missing)).view(x.data.dtype)
    return Fp8(data, F.pad(x.scales, (0, 0, 0, missing)))
