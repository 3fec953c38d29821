"""W8A8 products: the reference against exact arithmetic, our Triton sources through the interpreter, and on a GPU."""

from __future__ import annotations

import pytest
import torch
from millrace_bench.kernels.numeric import INT8_LINEAR_TOLERANCE, assert_close, rms_error
from millrace_bench.kernels.shapes import strided_rows
from millrace_kernels.backend import TABLE, forced
from millrace_kernels.int8 import Int8, int8_linear, quant_rows
from millrace_kernels.triton import int8 as ours

OURS = {op: TABLE[op][0].target for op in ("int8.quant_rows", "int8.int8_linear")}


def weight_of(n: int, k: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num", [0, 1, 17])
def test_rows_keep_their_largest_value(num: int, dtype: torch.dtype) -> None:
    x = strided_rows(num, 200, dtype)
    x[3:4] = 0.0
    found = quant_rows(x)
    with forced(**OURS):
        triton = quant_rows(x)
    for data, scales in (found, triton):
        assert data.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == (num,)
        assert (data.abs().amax(1) == 127).sum() == (x != 0).any(1).sum() and (scales[3:4] == 1).all()
        assert ((data * scales[:, None]).float() - x.float()).abs().le(scales[:, None] * 0.501).all()
    assert torch.equal(found.data, triton.data) and torch.equal(found.scales, triton.scales)


@pytest.mark.parametrize(("num", "n", "k"), [(0, 64, 128), (1, 72, 200), (17, 130, 384), (70, 64, 128)])
def test_int8_linear_is_exact(num: int, n: int, k: int) -> None:
    x, weight = quant_rows(strided_rows(num, k, torch.float32)), quant_rows(weight_of(n, k))
    exact = (x.data.long() @ weight.data.long().t()).double() * x.scales.double()[:, None] * weight.scales.double()
    stack = Int8(torch.stack((weight.data, weight.data))[1], weight.scales)
    found = int8_linear(x, stack, torch.float32)
    with forced(**OURS):
        triton = int8_linear(x, stack, torch.float32)
        assert int8_linear(x, stack, torch.bfloat16).dtype == torch.bfloat16
    assert_close(found, exact)
    assert_close(triton, exact)
    for chosen in (ours.Config(16, 64, 4, 3), ours.Config(64, 128, 8, 2)):
        assert torch.equal(ours.int8_linear_with(x, stack, torch.float32, chosen), triton)


def test_int8_linear_is_close_to_the_product_of_unquantised_operands() -> None:
    x, weight = strided_rows(33, 512, torch.bfloat16), weight_of(96, 512)
    found = int8_linear(quant_rows(x), quant_rows(weight), torch.float32)
    assert rms_error(found, x.double() @ weight.double().t()) < INT8_LINEAR_TOLERANCE


def test_sums_that_int32_cannot_hold_are_refused() -> None:
    wide = Int8(torch.zeros(1, 140_000, dtype=torch.int8), torch.ones(1))
    with pytest.raises(AssertionError, match="140000"):
        int8_linear(wide, wide, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("num", [0, 1, 7, 64, 128, 4096])
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (7168, 16384)])
def test_int8_linear_on_a_gpu(num: int, n: int, k: int) -> None:
    x, weight = quant_rows(strided_rows(num, k, torch.bfloat16).cuda()), quant_rows(weight_of(n, k, "cuda"))
    with forced(**dict.fromkeys(OURS, "")):
        expected = int8_linear(x, weight, torch.float32)
    assert_close(int8_linear(x, weight, torch.float32), expected, 1e-5)
