"""Norm, rope, silu, linear against their formulas in float64."""

import math

import pytest
import torch
from kernels.cases import TOKENS
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import Operand, quant_groups
from millrace_kernels.linear import linear, operand
from millrace_kernels.rms_norm import rms_norm
from millrace_kernels.rope import rope
from millrace_kernels.silu_mul import silu_mul
from millrace_kernels.testing.shapes import TINY
from millrace_testing.tolerances import assert_close
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16]


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def plain(operand: Operand) -> Tensor:
    assert operand.plain is not None
    return operand.plain


def norm64(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.parametrize("num", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm(num: int, dtype: torch.dtype) -> None:
    wide = draw(num, 3 * TINY.hidden, dtype=dtype) * 1e-3  # small values make eps count
    x, weight = wide[:, TINY.hidden : 2 * TINY.hidden], draw(TINY.hidden, dtype=dtype, seed=1)  # strided rows
    operand, same = rms_norm(x, None, weight, 1e-6)
    out = plain(operand)
    assert same is x and out.dtype == dtype and operand.fp8 is None
    assert_close(out, norm64(x, weight, 1e-6))


@pytest.mark.parametrize("num", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm(num: int, dtype: torch.dtype) -> None:
    x, residual = draw(num, TINY.hidden, dtype=dtype), draw(num, TINY.hidden, dtype=dtype, seed=1)
    weight = draw(TINY.hidden, dtype=dtype, seed=2)
    before = residual.clone()
    out, total = rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + before)
    assert_close(plain(out), norm64(total, weight, 1e-6))


def assert_same_operand(actual: Operand, expected: Operand) -> None:
    assert (actual.plain is None, actual.fp8 is None) == (expected.plain is None, expected.fp8 is None)
    for part, wanted in zip([actual.plain, *(actual.fp8 or ())], [expected.plain, *(expected.fp8 or ())], strict=True):
        assert part is None or torch.equal(part.float(), wanted.float())


@pytest.mark.parametrize("num", [0, 1, SMALL_TOKENS, SMALL_TOKENS + 1])
def test_quantising_ops_give_the_operand_of_their_result(num: int) -> None:
    x, residual = draw(num, TINY.hidden, dtype=torch.bfloat16), draw(num, TINY.hidden, dtype=torch.bfloat16, seed=1)
    weight = draw(TINY.hidden, dtype=torch.bfloat16, seed=2)
    for added in (None, residual):
        normed, total = rms_norm(x, added, weight, 1e-6, quant=True)
        assert torch.equal(total, x if added is None else x + added)
        assert_same_operand(normed, operand(plain(rms_norm(total, None, weight, 1e-6)[0])))
    act = silu_mul(x).plain
    assert act is not None
    expected = Operand(act, None) if num <= SMALL_TOKENS else Operand(None, quant_groups(act))
    assert_same_operand(silu_mul(x, quant=True), expected)


@pytest.mark.parametrize("num", TOKENS)
def test_rope_rotates_interleaved_pairs(num: int) -> None:
    angles = draw(num, TINY.rope // 2, seed=1)
    x = draw(num, TINY.heads, TINY.nope + TINY.rope)[..., TINY.nope :]  # a strided slice, as in the model
    out = rope(x, angles.cos(), angles.sin())
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    turned = pairs * torch.polar(torch.ones_like(angles).double(), angles.double()).unsqueeze(1)
    assert_close(out, torch.view_as_real(turned).flatten(-2))
    assert torch.equal(rope(x[:, 0], angles.cos(), angles.sin()), out[:, 0])  # without a head dimension


def test_rope_of_bf16_rotates_in_fp32() -> None:
    angles, x = draw(5, 32, seed=1), draw(5, 64, dtype=torch.bfloat16)
    out = rope(x, angles.cos(), angles.sin())
    assert torch.equal(out, rope(x.float(), angles.cos(), angles.sin()).bfloat16())


@pytest.mark.parametrize("num", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(num: int, dtype: torch.dtype) -> None:
    x = draw(num, 2 * TINY.moe_intermediate, dtype=dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(plain(silu_mul(x)), gate / (1 + (-gate).exp()) * up)


def test_silu_mul_of_extremes_is_finite() -> None:
    x = torch.tensor([[-1e4, 1e4, 2.0, 2.0]])
    assert plain(silu_mul(x)).tolist() == [[0.0, 2e4]]


@pytest.mark.parametrize("num", TOKENS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_linear(num: int, dtype: torch.dtype) -> None:
    x, weight = draw(num, TINY.hidden, dtype=dtype), draw(48, TINY.hidden, dtype=dtype, seed=1)
    expected = torch.tensor(
        [[math.fsum((row * col).tolist()) for col in weight.double()] for row in x.double()[:3]]
    ).reshape(min(num, 3), 48)
    out = linear(x, weight)
    assert out.shape == (num, 48) and out.dtype == dtype
    assert_close(out[:3], expected)
