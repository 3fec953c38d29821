"""Tolerances and errors that benches need too, and the poison for memory that must not be read."""

import torch
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8

FP8_TOLERANCE = 4e-2  # rms error of values quantised to E4M3; its 3 bits of mantissa cost 2.6e-2
TEXT_TOLERANCE = {"BF16": 0.02, "FP8": 0.08}  # the same over texts that it was not trained on; 0.005 and 0.026 on a CPU


def poisoned(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    """All NaN, so that every use of it shows in the result."""
    return torch.full(shape, torch.nan, dtype=dtype, device=device)


def dequantised(x: Fp8) -> Tensor:
    """float32 [T, K] of values with scales of 1 x 128 groups."""
    return x.data.float() * x.scales.repeat_interleave(BLOCK, 1)[:, : x.data.shape[1]]


def rms_error(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected| over all elements, for FP8. NaN is infinite."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not expected.numel():
        return 0.0
    error = (actual.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    return float("inf") if error.isnan() else float(error)
