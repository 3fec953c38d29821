"""Rotary tables with YaRN context extension (arXiv:2309.00071, section 3.4), as DeepSeek-V3 uses it.

theta_i = base^(-2i/R)         wavelengths that fit the original context often enough keep theta_i, long ones are slowed
to theta_i / factor, those in between are blended linearly over i.

>>> cos, sin = rope_tables(config, torch.device("cpu"))      # float32 [positions, R/2] each
"""

import math

import torch
from torch import Tensor

from millrace_serve.model.config import ModelConfig, RopeScaling

BEHIND = 8  # rows of drafts, which are never accepted there, may lie behind a model's last position


def rope_tables(config: ModelConfig, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of every position and of BEHIND more, float32 [max_position_embeddings + BEHIND, R/2], with YaRN's
    attention factor applied.
    """
    freqs = inverse_frequencies(config.qk_rope_head_dim, config.rope_theta, config.rope_scaling)
    angles = torch.arange(config.max_position_embeddings + BEHIND, dtype=torch.float32).unsqueeze(1) * freqs
    if device.type == "meta":  # a model that is only measured: nobody reads the millions of sines
        angles = angles.to(device)
    factor = 1.0
    if (scaling := config.rope_scaling) is not None:
        factor = _mscale(scaling.factor, scaling.mscale) / _mscale(scaling.factor, scaling.mscale_all_dim)
    return (angles.cos() * factor).to(device), (angles.sin() * factor).to(device)


def softmax_scale(config: ModelConfig) -> float:
    """1/sqrt(d), times the square of YaRN's attention temperature (0.1 mscale_all_dim ln(factor) + 1)."""
    scale = config.qk_head_dim**-0.5
    if (scaling := config.rope_scaling) is not None and scaling.mscale_all_dim:
        scale *= _mscale(scaling.factor, scaling.mscale_all_dim) ** 2
    return scale


def inverse_frequencies(rope_dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """theta_i, float32 [R/2]."""
    half = rope_dim // 2
    freqs = 1.0 / theta ** (torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim)
    if scaling is None:
        return freqs

    def dim_of(rotations: float) -> float:
        """The index i whose wavelength fits `rotations` times into the original context."""
        wavelength = scaling.original_max_position_embeddings / (rotations * 2 * math.pi)
        return rope_dim * math.log(wavelength) / (2 * math.log(theta))

    low = max(math.floor(dim_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dim_of(scaling.beta_slow)), rope_dim - 1)
    kept = 1 - ((torch.arange(half, dtype=torch.float32) - low) / max(high - low, 1e-3)).clamp(0, 1)
    return freqs / scaling.factor * (1 - kept) + freqs * kept


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0
