"""DeepSeek-V3's router (paper eq. 12-16): sigmoid scores, bias only for the choice, experts limited to the best groups.

s = sigmoid(logits)    group score = sum of its two largest (s + bias)    top-k of s + bias within the topk_group groups
weight = s / sum(s chosen)  (norm_topk_prob)  * routed_scaling_factor
"""

from __future__ import annotations

from torch import Tensor

from millrace_kernels.backend import implementation


def moe_gate(
    logits: Tensor,
    bias: Tensor,
    *,
    n_group: int,
    topk_group: int,
    top_k: int,
    norm_topk_prob: bool,
    routed_scaling_factor: float,
) -> tuple[Tensor, Tensor]:
    """logits float32 [T, E], bias float32 [E] -> weights float32 [T, K], experts int64 [T, K].

    Notes:
        Ties between groups and between experts go to the lower index. Experts come in falling order of s + bias.
        E is a multiple of n_group, a group has at least two experts and topk_group groups have at least top_k.
    """
    assert logits.shape[1] == bias.shape[0] and logits.shape[1] % n_group == 0, (logits.shape, bias.shape, n_group)
    choose = implementation("moe_gate.moe_gate", logits.device)
    return choose(
        logits,
        bias,
        n_group=n_group,
        topk_group=topk_group,
        top_k=top_k,
        norm_topk_prob=norm_topk_prob,
        routed_scaling_factor=routed_scaling_factor,
    )
