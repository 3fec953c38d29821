import pytest
import torch
from kernels.cases import TOKENS
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import (
    E4M3_MAX,
    Fp8,
    Operand,
    dequant_blocks,
    fp8_linear,
    quant_blocks,
    quant_groups,
    small_linear,
)
from millrace_kernels.linear import linear, operand
from millrace_testing.tolerances import FP8_LINEAR_TOLERANCE, assert_close, relative_error

SHAPES = [(128, 128), (256, 384), (576, 256), (100, 192), (1, 1), (129, 257)]


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("num", TOKENS)
@pytest.mark.parametrize("width", [128, 256, 200])
def test_quant_groups(num: int, width: int) -> None:
    x = draw(num, width) * torch.logspace(-3, 3, max(num, 1))[:num, None]
    quantized, scales = quant_groups(x)
    assert quantized.dtype == torch.float8_e4m3fn and scales.shape == (num, -(-width // 128))
    for start in range(0, width, 128):
        part, scale = x[:, start : start + 128], scales[:, start // 128]
        assert_close(scale, part.abs().amax(1) / E4M3_MAX)
        back = quantized[:, start : start + 128].float() * scale[:, None]
        # E4M3 has 3 bits of mantissa: half a step is 1/16 of the value, and 2^-10 of the scale near zero.
        assert ((back - part).abs() <= part.abs() / 16 + scale[:, None] * 2**-9).all()


def test_zero_group_stays_zero() -> None:
    quantized, scales = quant_groups(torch.zeros(2, 128))
    assert (quantized.float() == 0).all() and (scales == 1).all()


@pytest.mark.parametrize("shape", SHAPES)
def test_blocks_round_trip(shape: tuple[int, int]) -> None:
    weight = draw(*shape)
    quantized, scales = quant_blocks(weight)
    assert quantized.shape == shape and scales.shape == tuple(-(-n // 128) for n in shape)
    back = dequant_blocks(quantized, scales, torch.float32)
    for r in range(scales.shape[0]):
        for c in range(scales.shape[1]):
            block = (slice(r * 128, (r + 1) * 128), slice(c * 128, (c + 1) * 128))
            assert_close(scales[r, c], weight[block].abs().max() / E4M3_MAX)
            assert torch.equal(back[block], quantized[block].float() * scales[r, c])
    assert relative_error(back, weight) < 1 / 16


@pytest.mark.parametrize(("rows", "cols"), [((0, 256), (0, 384)), ((128, 256), (128, 256)), ((96, 192), (200, 384))])
def test_dequant_of_a_slice_is_the_slice_of_the_dequant(rows: tuple[int, int], cols: tuple[int, int]) -> None:
    quantized, scales = quant_blocks(draw(256, 384))
    whole = dequant_blocks(quantized, scales, torch.bfloat16)
    touched = scales[rows[0] // 128 : -(-rows[1] // 128), cols[0] // 128 : -(-cols[1] // 128)]
    part = dequant_blocks(quantized[slice(*rows), slice(*cols)], touched, torch.bfloat16, rows[0] % 128, cols[0] % 128)
    assert torch.equal(part, whole[slice(*rows), slice(*cols)])


@pytest.mark.parametrize("num", TOKENS)
@pytest.mark.parametrize("shape", [(128, 256), (576, 256), (64, 200)])
def test_fp8_linear(num: int, shape: tuple[int, int]) -> None:
    x, weight = draw(num, shape[1]), draw(*shape, seed=1)
    x8, w8 = quant_groups(x), quant_blocks(weight)
    out = fp8_linear(x8, w8, torch.float32)
    exact_x = x8.data.double() * x8.scales.double().repeat_interleave(128, 1)[:, : shape[1]]
    exact_w = dequant_blocks(*w8, torch.float32).double()
    assert_close(out, exact_x @ exact_w.T)
    assert relative_error(out, x @ weight.T) <= FP8_LINEAR_TOLERANCE


@pytest.mark.parametrize("num", [0, 1, 7, SMALL_TOKENS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_small_linear(num: int, dtype: torch.dtype) -> None:
    x, stack = draw(num, 256).to(dtype), [quant_blocks(draw(200, 256, seed=seed)) for seed in (1, 2)]
    weights = Fp8(*(torch.stack(parts) for parts in zip(*stack, strict=True)))
    for index, weight in enumerate(stack):
        out = small_linear(x, Fp8(weights.data[index], weights.scales[index]))
        assert out.shape == (num, 200) and out.dtype == dtype
        assert_close(out, x.double() @ dequant_blocks(*weight, torch.float32).double().T)


def test_linear_of_an_fp8_weight_has_the_form_for_its_tokens() -> None:
    weight = quant_blocks(draw(64, 256, seed=1))
    few, many = draw(SMALL_TOKENS, 256).bfloat16(), draw(SMALL_TOKENS + 1, 256).bfloat16()
    assert operand(few) == Operand(few, None)
    assert torch.equal(linear(few, weight), small_linear(few, weight))
    assert torch.equal(linear(operand(few), weight), small_linear(few, weight))
    both = operand(many)
    expected = fp8_linear(quant_groups(many), weight, torch.bfloat16)
    for x in (many, both, Operand(None, both.fp8), Operand(many, None)):
        assert torch.equal(linear(x, weight), expected)
    assert linear(many.float(), weight).dtype == torch.float32


def test_linear_takes_the_plain_form_for_a_plain_weight() -> None:
    x, weight = draw(20, 128), draw(8, 128, seed=1)
    assert torch.equal(linear(operand(x), weight), linear(x, weight))
