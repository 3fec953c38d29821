"""out_t = sum over chosen experts e held here of  weight_te * w2_e silu_mul(w13_e x_t)"""

from __future__ import annotations

from torch import Tensor

from millrace_kernels.backend import implementation


def moe_experts(x: Tensor, weights: Tensor, experts: Tensor, w13: Tensor, w2: Tensor, first_expert: int) -> Tensor:
    """The routed experts [first_expert, first_expert + E) applied to the tokens that chose them.

    Args:
        x: [T, D].
        weights: float32 [T, K]; experts: int64 [T, K] global ids; ids outside of the range, -1 included, count nothing.
        w13: [E, 2I, D], gate rows then up rows; w2: [E, D, I].
    Returns:
        [T, D] in x's dtype; 0 for a token none of whose experts is held here.
    """
    assert experts.shape == weights.shape and w13.shape[1] == 2 * w2.shape[2] and w13.shape[2] == x.shape[1]
    return implementation("moe_experts.moe_experts", x.device)(x, weights, experts, w13, w2, first_expert)
