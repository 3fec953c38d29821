"""Our side of FlashInfer's products: stand-ins with its calling conventions take its place. What only a bench compares
runs in test_gpu_compared.py.
"""

import sys
import types
from typing import Any

import pytest
import torch
from millrace_kernels.fp8 import Fp8, fp8_linear, quant_blocks
from millrace_kernels.lib import flashinfer_gemm
from millrace_kernels.triton import quant
from millrace_testing.tolerances import assert_close
from torch import Tensor

BF16 = torch.bfloat16


def library(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    if "." in name:
        monkeypatch.setitem(sys.modules, name.partition(".")[0], types.ModuleType(name.partition(".")[0]))
    module = types.ModuleType(name)
    module.__dict__.update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def sm90(x: Tensor, weight: Tensor, x_scales: Tensor, w_scales: Tensor, out: Tensor) -> Tensor:
    (num, k), n = x.shape, weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and out.dtype == BF16 and n % 64 == 0 and k % 128 == 0
    assert x_scales.shape == (num, k // 128) and x_scales.stride() == (1, -(-num // 4) * 4)
    assert w_scales.shape == (-(-n // 128), k // 128) and w_scales.is_contiguous()
    return out.copy_(fp8_linear(Fp8(x, x_scales), Fp8(weight, w_scales), BF16))


def groupwise(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, scale_major_mode: str | None, out_dtype: torch.dtype,
    backend: str,
) -> Tensor:  # fmt: skip
    (num, k), n = a.shape, b.shape[0]
    assert num % 4 == 0 and n % 128 == k % 128 == 0 and a.is_contiguous() and b.is_contiguous() and k >= 256
    assert scale_major_mode == {"cutlass": "K", "trtllm": None}[backend] and out_dtype == BF16
    assert a_scale.shape == (num, k // 128)
    if backend == "cutlass":
        assert a_scale.is_contiguous() and b_scale.is_contiguous() and b_scale.shape == (n // 128, k // 128)
    else:
        assert a_scale.t().is_contiguous() and b_scale.t().is_contiguous() and b_scale.shape == (k // 128, n // 128)
        b_scale = b_scale.t()
    return fp8_linear(Fp8(a, a_scale), Fp8(b, b_scale), BF16)


@pytest.mark.parametrize("function", ["fp8_linear_sm90", "fp8_linear_cutlass", "fp8_linear_trtllm"])
@pytest.mark.parametrize(
    ("num", "n", "k", "dtype"), [(0, 128, 256, BF16), (5, 128, 256, BF16), (8, 136, 256, BF16), (3, 128, 256, None)]
)
def test_products_of_flashinfer(
    function: str, num: int, n: int, k: int, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def counted(product: Any) -> Any:
        return lambda *args, **options: (calls.append(1), product(*args, **options))[1]

    library(
        monkeypatch, "flashinfer.gemm",
        fp8_blockscale_gemm_sm90=counted(sm90), gemm_fp8_nt_groupwise=counted(groupwise),
    )  # fmt: skip
    x, weight = quant.quant_groups(torch.randn(num, k).bfloat16()), quant_blocks(torch.randn(n, k))
    out_dtype = dtype or torch.float32
    found = getattr(flashinfer_gemm, function)(x, weight, out_dtype)
    assert found.dtype == out_dtype and len(calls) == (num > 0 and n == 128 and dtype is not None)
    assert_close(found, fp8_linear(x, weight, out_dtype))


@pytest.mark.parametrize("of_weight", [False, True])
def test_scales_that_flashinfer_would_misread_are_ours(of_weight: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    library(monkeypatch, "flashinfer.gemm", fp8_blockscale_gemm_sm90=sm90)
    x, weight = quant.quant_groups(torch.randn(5, 256).bfloat16()), quant_blocks(torch.randn(256, 256))
    if of_weight:
        weight = Fp8(weight.data, weight.scales.t().contiguous().t())
    else:
        x = Fp8(x.data, x.scales.contiguous())
    assert_close(flashinfer_gemm.fp8_linear_sm90(x, weight, BF16), fp8_linear(x, weight, BF16))
