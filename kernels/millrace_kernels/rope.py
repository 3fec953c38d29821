"""Rotary position embedding in DeepSeek's interleaved layout.

(out[2i], out[2i+1]) = (x[2i] cos_i - x[2i+1] sin_i, x[2i+1] cos_i + x[2i] sin_i)
"""

from __future__ import annotations

from torch import Tensor

from millrace_kernels.backend import implementation


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates pairs of the last dimension in FP32.

    Args:
        x: [T, R] or [T, H, R], any strides.
        cos, sin: float32 [T, R/2], of each token's position.
    Returns:
        A new tensor of x's shape and dtype, still interleaved.
    """
    assert x.shape[0] == cos.shape[0] and x.shape[-1] == 2 * cos.shape[-1], (x.shape, cos.shape)
    return implementation("rope.rope", x.device)(x, cos, sin)
