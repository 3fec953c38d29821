"""What the table chooses on a GPU, over DeepSeek-V3's widths, against the references on the same GPU."""

from collections.abc import Callable
from typing import TypeVar

import pytest
import torch
from kernels.graphs import captured
from millrace_kernels import backend, fp8, linear, rms_norm, silu_mul
from millrace_kernels.backend import SMALL_TOKENS, forced
from millrace_kernels.fp8 import Fp8, Operand
from millrace_kernels.testing.attention_inputs import Draw
from millrace_kernels.testing.tolerances import FP8_TOLERANCE, dequantised, poisoned, rms_error
from millrace_kernels.triton import fp8_linear
from millrace_testing.tolerances import assert_close
from torch import Tensor

pytestmark = pytest.mark.gpu

TOKENS = [0, 1, 7, SMALL_TOKENS + 1, 64, 128, 4096]
FEW = [0, 1, 2, 4, 7, SMALL_TOKENS]
V3_WEIGHTS = [
    (2112, 7168), (3072, 1536), (7168, 2048), (4608, 7168), (7168, 2304), (512, 7168), (7168, 256),
    (24576, 1536), (32768, 512), (7168, 16384), (4096, 7168),
]  # fmt: skip
T = TypeVar("T")
REFERENCES = dict.fromkeys(backend.TABLE, "")
TIES = 1.5e-2  # rms; an inverse, and of a few ulps there, may turn a tie to the neighbouring E4M3 value
ULP = 1.2e-7


def rows(num: int, width: int, seed: int = 0) -> Tensor:
    return Draw("cuda", dtype=torch.bfloat16, seed=seed).part(num, width)


def stacked_weight(n: int, k: int) -> Fp8:
    """The middle one of three, whose neighbours are NaN."""
    middle = fp8.quant_blocks(torch.randn(n, k, device="cuda"))
    data = poisoned((3, n, k), device="cuda").to(torch.float8_e4m3fn)
    scales = poisoned((3, *middle.scales.shape), device="cuda")
    data[1], scales[1] = middle
    return Fp8(data[1], scales[1])


def expected(call: Callable[[], T]) -> T:
    with forced(**REFERENCES):
        return call()


def assert_same_operand(found: Operand, wanted: Operand) -> None:
    assert (found.plain is None, found.fp8 is None) == (wanted.plain is None, wanted.fp8 is None)
    if found.plain is not None and wanted.plain is not None:
        assert_close(found.plain, wanted.plain)
    if found.fp8 is not None and wanted.fp8 is not None:
        assert found.fp8.scales.stride() == (1, -(-found.fp8.scales.shape[0] // 4) * 4)
        assert rms_error(dequantised(found.fp8), dequantised(wanted.fp8)) < FP8_TOLERANCE


@pytest.mark.parametrize("width", [7168, 1536, 512, 200])
@pytest.mark.parametrize("num", TOKENS)
def test_norms_and_quantisation(num: int, width: int) -> None:
    x, residual, weight = rows(num, width), rows(num, width, 1), torch.randn(width, device="cuda").bfloat16()
    quantised, wanted = fp8.quant_groups(x), expected(lambda: fp8.quant_groups(x))
    torch.testing.assert_close(quantised.scales, wanted.scales, rtol=ULP, atol=0.0)
    assert rms_error(dequantised(quantised), dequantised(wanted)) < TIES
    normed, _ = rms_norm.rms_norm(x, None, weight, 1e-6)
    assert_same_operand(normed, expected(lambda: rms_norm.rms_norm(x, None, weight, 1e-6)[0]))
    quant, _ = rms_norm.rms_norm(x, None, weight, 1e-6, quant=True)
    assert normed.plain is not None
    assert_same_operand(quant, expected(lambda: linear.operand(normed.plain)))
    summed, total = rms_norm.rms_norm(x, residual, weight, 1e-6, quant=True)
    assert torch.equal(total, x + residual)
    assert_same_operand(summed, expected(lambda: rms_norm.rms_norm(total, None, weight, 1e-6, quant=True)[0]))
    alone, again = rms_norm.rms_norm(x, residual, weight, 1e-6, quant=True, plain=False)
    assert torch.equal(again, total) and (alone.plain is None) == (num > SMALL_TOKENS)
    assert_same_operand(Operand(summed.plain, alone.fp8), summed)
    plain, again = rms_norm.rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(again, total) and plain.plain is not None and summed.plain is not None
    assert_close(plain.plain, summed.plain)  # another kernel, which may sum in another order


@pytest.mark.parametrize("width", [2304, 2048, 256])
@pytest.mark.parametrize("num", TOKENS)
def test_silu_mul(num: int, width: int) -> None:
    x = rows(num, 2 * width)
    for quant in (False, True):
        found = silu_mul.silu_mul(x, quant=quant)
        assert_same_operand(found, expected(lambda quant=quant: silu_mul.silu_mul(x, quant=quant)))


@pytest.mark.parametrize(("n", "k"), V3_WEIGHTS)
def test_small_linear(n: int, k: int) -> None:
    weight = stacked_weight(n, k)
    for num in FEW:
        x = rows(num, k)
        found = fp8.small_linear(x, weight)
        assert_close(found, expected(lambda x=x: fp8.small_linear(x, weight)))
        assert torch.equal(found, fp8.small_linear(x, weight)), "a shape has one result"


@pytest.mark.parametrize(("n", "k"), V3_WEIGHTS)
def test_fp8_linear(n: int, k: int) -> None:
    weight = stacked_weight(n, k)
    for num in (0, 17, 64, 128, 4096):
        x = fp8.quant_groups(rows(num, k))
        wanted = expected(lambda x=x: fp8.fp8_linear(x, weight, torch.float32))
        for choice in backend.choices("fp8.fp8_linear", weight.data.device):
            with forced(**{"fp8.fp8_linear": choice.target}):
                assert_close(fp8.fp8_linear(x, weight, torch.bfloat16), wanted, 1e-2)


@pytest.mark.parametrize(("n", "k"), V3_WEIGHTS)
def test_fp8_linear_in_parts(n: int, k: int) -> None:
    """Every way of ours to load and to add up; parts are added in order, so equal inputs give equal bits."""
    weight, most = stacked_weight(n, k), max(k // 128 // 3, 1)
    for num, tile in ((17, (32, 128)), (64, (64, 128)), (100, (128, 64)), (256, (128, 64))):
        x = fp8.quant_groups(rows(num, k))
        wanted = expected(lambda x=x: fp8.fp8_linear(x, weight, torch.float32))
        for splits, tma, joined in ((1, True, True), (3, True, True), (5, True, False), (4, False, True)):
            chosen = fp8_linear.Fp8LinearConfig(*tile, min(splits, most), 4, 3, tma=tma, joined=joined)
            found = [fp8_linear.fp8_linear(x, weight, torch.bfloat16, chosen) for _ in range(3)]
            assert_close(found[0], wanted, 1e-2)
            assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def layer(x: Tensor, gain: Tensor, first: Fp8, second: Fp8) -> tuple[Tensor, Tensor]:
    operand, total = rms_norm.rms_norm(x, x, gain, 1e-6, quant=True)
    return linear.linear(silu_mul.silu_mul(linear.linear(operand, first), quant=True), second), total


@pytest.mark.parametrize("num", [1, 4, SMALL_TOKENS, 64])
def test_graph_replays_what_eager_computes(num: int) -> None:
    x, gain = rows(num, 7168).contiguous(), torch.randn(7168, device="cuda").bfloat16()
    weights = stacked_weight(4608, 7168), stacked_weight(7168, 2304)
    wanted = layer(x, gain, *weights)
    graph, found = captured(lambda: layer(x, gain, *weights))
    for part in found:
        part.fill_(torch.nan)
    graph.replay()
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
