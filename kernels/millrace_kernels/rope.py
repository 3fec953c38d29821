import torch
from torch import Tensor


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding in DeepSeek's interleaved layout, in FP32.

    (out[2i], out[2i+1]) = (x[2i] cos_i - x[2i+1] sin_i, x[2i+1] cos_i + x[2i] sin_i)

    Args:
        x: [T, R] or [T, H, R], any strides.
        cos, sin: float32 [T, R/2], of each token's position.
    """
    if x.dim() == 3:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    rotated = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)  # [T, (H,) R/2, 2]
    return rotated.flatten(-2).to(x.dtype)
