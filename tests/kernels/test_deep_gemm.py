"""Our side of DeepGEMM: a stand-in with its calling convention takes the library's place."""

import sys
import types

import pytest
import torch
from millrace_kernels.fp8 import Fp8, fp8_linear, quant_blocks
from millrace_kernels.lib import deep_gemm
from millrace_kernels.triton.quant import quant_groups
from millrace_testing.tolerances import assert_close
from torch import Tensor

CPU = torch.device("cpu")
Pair = tuple[Tensor, Tensor]


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(M, N, K) of each product that the library was given; it insists on the layouts that TMA loads."""
    seen: list[tuple[int, int, int]] = []

    def fp8_gemm_nt(a: Pair, b: Pair, d: Tensor) -> None:
        (m, k), n = a[0].shape, b[0].shape[0]
        assert d.shape == (m, n) and d.dtype == torch.bfloat16 and d.stride() == (n, 1) and n * 2 % 16 == 0
        assert a[1].shape == (m, k // 128) and a[1].stride() == (1, -(-m // 4) * 4) and a[1].dtype == torch.float32
        assert b[1].shape == (-(-n // 128), k // 128) and b[1].is_contiguous()
        assert all(part.stride(1) == 1 and part.dtype == torch.float8_e4m3fn for part in (a[0], b[0]))
        seen.append((m, n, k))
        d.copy_(fp8_linear(Fp8(*a), Fp8(*b), torch.bfloat16))

    library = types.ModuleType("deep_gemm")
    library.fp8_gemm_nt = fp8_gemm_nt  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    return seen


def draw(num: int, width: int) -> Tensor:
    return torch.randn(num, width, generator=torch.Generator().manual_seed(num))


@pytest.mark.parametrize("num", [1, 17, 65])
def test_products_that_tma_can_address_go_to_the_library(products: list[tuple[int, int, int]], num: int) -> None:
    x, weight = quant_groups(draw(num, 256)), quant_blocks(draw(136, 256))
    out = deep_gemm.fp8_linear(x, weight, torch.bfloat16)
    assert products == [(num, 136, 256)]
    assert torch.equal(out, fp8_linear(x, weight, torch.bfloat16))


@pytest.mark.parametrize(
    ("n", "k", "dtype"), [(136, 256, torch.float32), (100, 256, torch.bfloat16), (136, 200, torch.bfloat16)]
)
def test_others_are_ours(products: list[tuple[int, int, int]], n: int, k: int, dtype: torch.dtype) -> None:
    x, weight = quant_groups(draw(3, k)), quant_blocks(draw(n, k))
    out = deep_gemm.fp8_linear(x, weight, dtype)
    assert products == [] and out.dtype == dtype
    assert_close(out, fp8_linear(x, weight, torch.float32))


def test_no_tokens_are_no_product(products: list[tuple[int, int, int]]) -> None:
    out = deep_gemm.fp8_linear(quant_groups(draw(0, 256)), quant_blocks(draw(136, 256)), torch.bfloat16)
    assert out.shape == (0, 136) and products == []


def test_compiling_ahead_meets_every_number_of_tiles_once_per_shape(
    products: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deep_gemm, "_met", {})
    for n, k in ((128, 256), (256, 128), (128, 256)):
        deep_gemm.fp8_linear(quant_groups(draw(3, k)), quant_blocks(draw(n, k)), torch.bfloat16)
    products.clear()
    assert deep_gemm.compile_ahead(150, CPU) == 2
    assert [m for m, *shape in products if shape == [128, 256]] == [16, 32, 64, 128, 192] == deep_gemm.sizes(150)
    assert len(products) == 10

    from_the_first = list(products)
    products.clear()
    deep_gemm.compile_ahead(150, CPU, start=0.5)
    assert products == from_the_first[5:] + from_the_first[:5]
