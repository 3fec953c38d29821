"""Tolerances of results, besides those of millrace_kernels.testing.tolerances."""

import torch
from torch import Tensor

# Largest error, as a part of the largest expected magnitude.
OP_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1e-2}
FP8_LINEAR_TOLERANCE = 5e-2  # of an FP8 product against the product of the unquantised operands
INT8_LINEAR_TOLERANCE = 2e-2  # of a W8A8 product likewise; normal values lose 1e-2 each to a scale per row
FP8_EXPERTS_TOLERANCE = 8e-2  # of experts with FP8 activations: two such products, and what lies between quantised
ATTENTION_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # sums over keys in another order
LSE_TOLERANCE = 1e-4  # of float32 log-sum-exps of BF16 products
FP8_ATTENTION_TOLERANCE = 1e-1  # queries and probabilities in E4M3 too, against an FP8 pool dequantised
ROTARY_TOLERANCE = 1e-5  # of cos and sin: one rounding of a frequency, times thousands of positions
MODEL_TOLERANCE = 1e-4  # logits of a whole model in FP32, two different computations of the same maths
LOGPROB_TOLERANCE = 3e-4  # of tokens of models/tiny by transformers; rounding makes 4e-5 on a CPU
FP8_MODEL_TOLERANCE = 0.15  # logits of the tiny model with FP8 activations: |difference| / |row|, median over rows


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """max |actual - expected| / max |expected|, 0 for empty tensors; NaN or misplaced infinities count as infinite."""
    assert actual.shape == expected.shape, (actual.shape, expected.shape)
    if not expected.numel():
        return 0.0
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite) or not torch.equal(actual[~finite], expected[~finite]):
        return float("inf")
    difference = (actual[finite].double() - expected[finite].double()).abs()
    largest = expected[finite].double().abs()
    return float(difference.max() / largest.max().clamp_min(1e-30)) if difference.numel() else 0.0


def assert_close(actual: Tensor, expected: Tensor, tolerance: float | None = None) -> None:
    """`tolerance` defaults to that of one op in actual's dtype."""
    limit = OP_TOLERANCE[actual.dtype] if tolerance is None else tolerance
    error = relative_error(actual, expected)
    assert error <= limit, f"relative error {error:.2e} exceeds {limit:.0e} for shape {list(actual.shape)}"
