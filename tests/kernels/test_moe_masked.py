"""Experts on rows that are sorted by expert: our kernel in Triton's interpreter, and a stand-in for DeepGEMM."""

import sys
import types

import pytest
import torch
from millrace_kernels.fp8 import Fp8, fp8_linear
from millrace_kernels.lib import deep_gemm_grouped
from millrace_kernels.moe_experts import moe_experts
from millrace_kernels.moe_masked import BLOCK_ROWS, moe_masked
from millrace_kernels.silu_mul import reference_silu_mul
from millrace_kernels.testing.expert_inputs import draw_experts
from millrace_kernels.testing.tolerances import FP8_TOLERANCE, dequantised, rms_error
from millrace_kernels.triton import moe_masked as kernel
from millrace_kernels.triton.quant import quant_groups
from millrace_testing.poison import poison_empty
from millrace_testing.tolerances import FP8_EXPERTS_TOLERANCE, assert_close
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that are not there

Pair = tuple[Tensor, Tensor]
HELD, MOST, DIM, SIZE = 4, 2 * BLOCK_ROWS, 256, 256
COUNTS = ([MOST, 0, 1, BLOCK_ROWS + 7], [0, 0, 0, 0])


def rows(counts: list[int]) -> Fp8:
    """Scales column by column, and NaN where nothing came."""
    data, scales = torch.full((HELD, MOST, DIM), torch.nan), torch.full((HELD, DIM // 128, MOST), torch.nan)
    data = data.to(torch.float8_e4m3fn)
    generator = torch.Generator().manual_seed(0)
    for expert, count in enumerate(counts):
        x = quant_groups(torch.randn(count, DIM, generator=generator))
        data[expert, :count], scales[expert, :, :count] = x.data, x.scales.t()
    return Fp8(data, scales.transpose(1, 2))


def multiply(a: Pair, b: Pair, d: Tensor, masked_m: Tensor, expected_m: int) -> None:
    """What DeepGEMM 0.1.5 checks and does on sm90."""
    assert type(a) is tuple and type(b) is tuple  # it takes no subclass
    (held, most, k), n = a[0].shape, b[0].shape[1]
    assert a[0].is_contiguous() and d.is_contiguous() and d.shape == (held, most, n)
    assert a[1].shape == (held, most, k // 128) and a[1].stride() == (most * k // 128, 1, most)
    assert masked_m.shape == (held,) and masked_m.dtype == torch.int32 and 0 < expected_m <= most
    for expert, count in enumerate(masked_m.tolist()):
        part, weight = Fp8(a[0][expert, :count], a[1][expert, :count]), Fp8(b[0][expert], b[1][expert])
        first = expert * most
        d.view(-1, n)[first : first + -(-count // BLOCK_ROWS) * BLOCK_ROWS] = torch.nan  # in whole blocks
        d[expert, :count] = fp8_linear(part, weight, torch.bfloat16)


@pytest.mark.parametrize("counts", COUNTS)
def test_products_of_the_library_equal_the_reference(counts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    library = types.ModuleType("deep_gemm")
    library.fp8_m_grouped_gemm_nt_masked = multiply  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deep_gemm", library)
    x, here = rows(counts), torch.tensor(counts, dtype=torch.int32)
    w13, w2 = draw_experts(HELD, DIM, SIZE, torch.bfloat16, True, here.device, torch.Generator().manual_seed(1))
    expected = moe_masked(x, here, w13, w2, 64)
    poison_empty(monkeypatch)
    found = deep_gemm_grouped.moe_masked(x, here, w13, w2, 64)
    assert found.dtype == torch.bfloat16 and found.shape == (HELD, MOST, DIM)
    for expert, count in enumerate(counts):
        assert_close(found[expert, :count], expected[expert, :count], FP8_EXPERTS_TOLERANCE)


def test_reference_equals_that_of_unsorted_rows() -> None:
    counts = COUNTS[0]
    x = rows(counts)
    w13, w2 = draw_experts(HELD, DIM, SIZE, torch.bfloat16, True, x.data.device, torch.Generator().manual_seed(1))
    found = moe_masked(x, torch.tensor(counts, dtype=torch.int32), w13, w2, 64)
    for expert, count in enumerate(counts):
        plain = dequantised(Fp8(x.data[expert, :count], x.scales[expert, :count])).bfloat16()
        ids = torch.full((count, 1), expert, dtype=torch.int32)
        assert_close(found[expert, :count], moe_experts(plain, torch.ones(count, 1), ids, w13, w2))


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize("per_sm", [1, 8])
def test_swiglu_writes_the_rows_that_are_there(counts: list[int], per_sm: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "sms", lambda: 4)  # so a program has several tiles, or one or none
    monkeypatch.setattr(kernel, "PER_SM", per_sm)
    x = torch.full((HELD, MOST, 2 * SIZE), torch.nan, dtype=torch.bfloat16)
    for expert, count in enumerate(counts):
        x[expert, :count] = torch.randn(count, 2 * SIZE, generator=torch.Generator().manual_seed(expert))
    poison_empty(monkeypatch)
    found = kernel.silu_mul_quant(x, torch.tensor(counts, dtype=torch.int32))
    for expert, count in enumerate(counts):
        part = Fp8(found.data[expert, :count], found.scales[expert, :count])
        assert rms_error(dequantised(part), reference_silu_mul(x[expert, :count].float())) < FP8_TOLERANCE
        assert found.data[expert, count:].float().isnan().all() and found.scales[expert, count:].isnan().all()
