"""Our Triton sources for quantisation, norms, SwiGLU and few-token products, run by Triton's interpreter."""

import itertools

import pytest
import torch
from millrace_kernels import rms_norm as norms
from millrace_kernels.backend import SMALL_TOKENS, TABLE, forced
from millrace_kernels.fp8 import Fp8, Operand, dequant_blocks, quant_blocks, quant_groups, small_linear
from millrace_kernels.scratch import Scratch
from millrace_kernels.silu_mul import silu_mul
from millrace_kernels.testing.attention_inputs import Draw
from millrace_kernels.testing.tolerances import FP8_TOLERANCE, dequantised, rms_error
from millrace_kernels.triton import fp8_linear as mid
from millrace_kernels.triton import quant as kernels
from millrace_kernels.triton import rms_norm
from millrace_kernels.triton import small_linear as small
from millrace_kernels.triton.gemv import Gemv
from millrace_kernels.triton.small_linear import SmallLinearConfig, config
from millrace_testing.tolerances import assert_close
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU test_gpu_dense.py runs the same kernels")

OURS = {op: rows[0].target for op, rows in TABLE.items() if ".triton." in rows[0].target}
TIES = 5e-3  # rms; an inverse instead of a division may turn a tie, to the neighbouring E4M3 value
BF16, FP32, MANY = torch.bfloat16, torch.float32, SMALL_TOKENS + 1
# Widths of groups that are no power of two, and with a partial one.
shapes = pytest.mark.parametrize(
    ("num", "width", "dtype"), [(0, 384, BF16), (1, 200, FP32), (MANY, 384, FP32), (MANY, 200, BF16)]
)


def assert_column_major(scales: Tensor) -> None:
    num_tokens = scales.shape[0]
    assert num_tokens == 0 or scales.stride() == (1, -(-num_tokens // 4) * 4)


@shapes
def test_quant_groups(num: int, width: int, dtype: torch.dtype) -> None:
    x = Draw(dtype=dtype).part(num, width)
    expected = quant_groups(x)
    with forced(**OURS):
        fast = quant_groups(x)
    assert torch.equal(fast.scales, expected.scales)
    assert_column_major(fast.scales)
    assert rms_error(dequantised(fast), dequantised(expected)) < TIES


def test_quant_groups_of_zeros_and_of_almost_nothing() -> None:
    x = torch.zeros(3, 128)
    x[1], x[2, 5] = 1e-38, 448.0
    for quantised in (quant_groups(x), kernels.quant_groups(x, (4, 1))):
        assert (quantised.scales == 1).all() and quantised.data.float().sum() == 448.0


@shapes
def test_rms_norm(num: int, width: int, dtype: torch.dtype) -> None:
    x, residual = Draw(dtype=dtype).part(num, width), Draw(dtype=dtype, seed=1).part(num, width)
    weight = torch.randn(width, generator=torch.Generator().manual_seed(2)).to(dtype)
    for added in (None, residual):
        expected, expected_total = norms.rms_norm(x, added, weight, 1e-6)
        with forced(**OURS):
            normed, total = norms.rms_norm(x, added, weight, 1e-6)
            operand, total_too = norms.rms_norm(x, added, weight, 1e-6, quant=True)
        assert normed.fp8 is None and normed.plain is not None and expected.plain is not None
        assert_close(normed.plain, expected.plain)
        assert torch.equal(total, expected_total) and torch.equal(total_too, total)
        assert operand.plain is not None and torch.equal(operand.plain, normed.plain)
        assert_quantised(operand, normed.plain)


@pytest.mark.parametrize(("num", "dtype"), [(0, FP32), (1, BF16), (MANY, BF16), (MANY, FP32)])
def test_norm_without_its_plain_form(num: int, dtype: torch.dtype) -> None:
    x, weight = Draw(dtype=dtype).part(num, 256), torch.randn(256, generator=torch.Generator().manual_seed(2)).to(dtype)
    for target, residual in itertools.product((OURS, dict.fromkeys(OURS, "")), (None, x)):
        with forced(**target):
            wanted, total = norms.rms_norm(x, residual, weight, 1e-6, quant=True)
            found, total_too = norms.rms_norm(x, residual, weight, 1e-6, quant=True, plain=False)
        assert torch.equal(total, total_too)
        if num > SMALL_TOKENS and dtype == torch.bfloat16:
            assert found.plain is None
        else:
            assert found.plain is not None and wanted.plain is not None and torch.equal(found.plain, wanted.plain)
        if found.fp8 is None or wanted.fp8 is None:
            assert num <= SMALL_TOKENS
        else:
            assert torch.equal(found.fp8.data.float(), wanted.fp8.data.float())
            assert torch.equal(found.fp8.scales, wanted.fp8.scales)


@pytest.mark.parametrize(("groups", "warps", "plain"), [(1, 1, True), (2, 2, False), (8, 4, True)])
def test_norm_in_tiles_is_that_of_the_reference(groups: int, warps: int, plain: bool) -> None:
    """The last tile ends within the row, or beyond it."""
    width, weight = 384, torch.randn(384, generator=torch.Generator().manual_seed(2)).bfloat16()
    x, residual = (Draw(dtype=torch.bfloat16, seed=seed).part(SMALL_TOKENS + 1, width) for seed in (0, 1))
    expected, expected_total = norms.rms_norm(x, residual, weight, 1e-6, quant=True)
    found, total = rms_norm.rms_norm(x, residual, weight, 1e-6, True, plain, (groups, warps))
    assert torch.equal(total, expected_total) and found.fp8 is not None and expected.plain is not None
    assert (found.plain is not None) == plain
    if found.plain is not None:
        assert_close(found.plain, expected.plain)
    assert_quantised(found, expected.plain)


def test_rows_of_v3_are_whole_tiles() -> None:
    assert rms_norm.tile(16384, 7168) == (8, 4) and rms_norm.tile(256, 7168) == (64, 16)
    assert rms_norm.tile(4096, 1536) == (16, 2) and rms_norm.tile(17, 64) == (1, 1)


def assert_quantised(found: Operand, plain: Tensor) -> None:
    assert (found.fp8 is None) == (plain.shape[0] <= SMALL_TOKENS)
    if found.fp8 is not None:
        assert_column_major(found.fp8.scales)
        assert rms_error(dequantised(found.fp8), dequantised(quant_groups(plain))) < TIES


@shapes
def test_silu_mul(num: int, width: int, dtype: torch.dtype) -> None:
    x = Draw(dtype=dtype).part(num, 2 * width)
    exact, _ = silu_mul(x.double())
    with forced(**OURS):
        (plain, nothing), operand = silu_mul(x), silu_mul(x, quant=True)
    assert plain is not None and exact is not None and nothing is None and plain.dtype == dtype
    assert_close(plain, exact)
    if num <= SMALL_TOKENS:
        assert operand.fp8 is None and operand.plain is not None and torch.equal(operand.plain, plain)
    else:
        assert operand.plain is None and operand.fp8 is not None
        assert_column_major(operand.fp8.scales)
        assert rms_error(dequantised(operand.fp8), exact) < FP8_TOLERANCE


@pytest.mark.parametrize(("num", "n", "k"), [(0, 200, 200), (1, 40, 1152), (7, 200, 200), (SMALL_TOKENS, 40, 1152)])
def test_small_linear(num: int, n: int, k: int) -> None:
    x = Draw(dtype=torch.bfloat16).part(num, k)
    weight = quant_blocks(torch.randn(n, k, generator=torch.Generator().manual_seed(1)))
    stack = Fp8(torch.stack((weight.data, weight.data.clone()))[1], torch.stack((weight.scales, weight.scales))[1])
    exact = x.double() @ dequant_blocks(*weight, torch.float32).double().T
    with forced(**OURS):
        found = small_linear(x, stack)
    assert found.dtype == torch.bfloat16
    assert_close(found, exact)
    if num > 1:
        for splits in (1, 3):
            assert_close(small.small_linear(x, weight, SmallLinearConfig(32, splits, 4, 2)), exact)


MID = [
    mid.Fp8LinearConfig(32, 64, 1, 4, 3),
    mid.Fp8LinearConfig(64, 128, 2, 4, 3),
    mid.Fp8LinearConfig(128, 64, 3, 4, 3, tma=False),
    mid.Fp8LinearConfig(64, 64, 3, 4, 3, joined=False),
]


@pytest.mark.parametrize(
    ("num", "n", "k", "chosen"),
    [(0, 128, 128, None), (17, 200, 200, None),
     (17, 72, 200, MID[0]), (65, 136, 256, MID[1]), (17, 72, 384, MID[2]), (65, 72, 384, MID[3])],
)  # fmt: skip
def test_fp8_linear(num: int, n: int, k: int, chosen: mid.Fp8LinearConfig | None) -> None:
    x = kernels.quant_groups(Draw(dtype=torch.bfloat16).part(num, k), (1, 1))
    weight = quant_blocks(torch.randn(n, k, generator=torch.Generator().manual_seed(1)))
    found = mid.fp8_linear(x, weight, torch.float32, chosen or mid.config(num, n, k))
    assert found.dtype == torch.float32
    exact = dequantised(x).double() @ dequant_blocks(*weight, torch.float32).double().T
    assert_close(found, exact)
    assert torch.equal(mid.fp8_linear(x, weight, torch.bfloat16), found.bfloat16()) or chosen


def test_parts_of_a_replayed_step_are_joined_again() -> None:
    x, weight = kernels.quant_groups(torch.randn(20, 384), (1, 1)), quant_blocks(torch.randn(136, 384))
    scratch, chosen = Scratch(torch.device("cpu")), mid.Fp8LinearConfig(32, 64, 3, 4, 3)
    found = []
    for _ in range(2):
        with scratch.step():
            found.append(mid.fp8_linear(x, weight, torch.float32, chosen))
    assert torch.equal(*found)
    assert_close(found[0], dequantised(x).double() @ dequant_blocks(*weight, torch.float32).double().T)


def test_a_measured_shape_is_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mid.MEASURED.rows, (128, 24, 256), mid.Fp8LinearConfig(128, 64, 2, 4, 3))
    row = TABLE["fp8.fp8_linear"][0]
    assert row.serves(65, (24, 256)) and row.serves(128, (24, 256)) and mid.config(100, 24, 256).splits == 2
    assert not any(row.serves(num, (24, 256)) for num in (64, 129, 512))
    assert not row.serves(128, (24, 128))


@pytest.mark.parametrize(
    ("num", "n", "k", "chosen"),
    [(1, 43, 1352, Gemv(4, 512, 1)), (1, 32, 2048, Gemv(8, 1024, 4)), (3, 43, 1352, Gemv(2, 2048, 4)),
     (4, 32, 2048, Gemv(4, 512, 1)), (3, 43, 1352, SmallLinearConfig(32, 3, 4, 2)),
     (1, 32, 2048, SmallLinearConfig(32, 3, 4, 2))],
)  # fmt: skip
def test_few_rows_in_tiles(num: int, n: int, k: int, chosen: Gemv | SmallLinearConfig) -> None:
    """The last tile ends within the weight, beyond it, or with it; so do the last rows."""
    x = Draw(dtype=torch.bfloat16).part(num, k)
    weight = quant_blocks(torch.randn(n, k, generator=torch.Generator().manual_seed(1)))
    exact = x.double() @ dequant_blocks(*weight, torch.float32).double().T
    assert_close(small.small_linear(x, weight, chosen), exact)


def test_small_linear_of_fp32_rows_does_not_round_them() -> None:
    x, weight = torch.randn(2, 256), quant_blocks(torch.randn(64, 256))
    with forced(**OURS):
        assert_close(small_linear(x, weight), x.double() @ dequant_blocks(*weight, torch.float32).double().T)


@pytest.mark.parametrize("num", [1, 2, 4, 16])
@pytest.mark.parametrize(
    ("n", "k"), [(2112, 7168), (3072, 1536), (7168, 2048), (512, 7168), (7168, 256), (24576, 1536), (7168, 16384)]
)
def test_every_sm_has_work_at_v3_shapes(num: int, n: int, k: int) -> None:
    chosen = config(num, n, k)
    splits = 1 if isinstance(chosen, Gemv) else chosen.splits
    assert 128 % chosen.block_n == 0 and splits <= -(-k // 128)
    assert -(-n // chosen.block_n) * splits >= 112
