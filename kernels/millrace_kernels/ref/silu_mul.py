from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def silu_mul(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up
