"""The experts of one layer that this rank holds."""

from __future__ import annotations

from collections.abc import Callable

from millrace_kernels.fp8 import Operand
from millrace_kernels.moe_experts import moe_experts
from torch import Tensor

from millrace_serve.model.config import ModelConfig
from millrace_serve.model.experts.placement import Placement, SlotMap
from millrace_serve.model.parallel import ParallelDims, check_divides
from millrace_serve.model.weights import Part, Weights


class HeldExperts:
    """w13 [S, 2I, D] and w2 [S, D, I] of the rank's S slots, and of the shared expert at the end.

    With `expert_tp` the rank has a part of each: rows of w13, columns of w2.
    """

    def __init__(
        self,
        ckpt: Weights,
        config: ModelConfig,
        dims: ParallelDims,
        placement: Placement,
        layer: int,
        *,
        with_shared: bool,
    ) -> None:
        self.num_experts = config.n_routed_experts  # routed experts of the model
        self.with_shared = with_shared
        self.slots: Callable[[Tensor], Tensor] = SlotMap(placement, layer, dims.ep_rank, ckpt.device)
        experts, prefix = placement.slots_of_rank(layer, dims.ep_rank), f"model.layers.{layer}.mlp"
        hidden, size, part = config.hidden_size, config.moe_intermediate_size, None
        if dims.expert_tp:
            width = check_divides("moe_intermediate_size", size, "tp", dims.tp)
            part = (dims.tp_rank * width, (dims.tp_rank + 1) * width)
        for expert in sorted({*range(config.n_routed_experts)} - {*experts}):
            ckpt.claim(f"{prefix}.experts.{expert}.gate_proj.weight", (size, hidden))
            ckpt.claim(f"{prefix}.experts.{expert}.up_proj.weight", (size, hidden))
            ckpt.claim(f"{prefix}.experts.{expert}.down_proj.weight", (hidden, size))
        held = [f"{prefix}.experts.{expert}" for expert in experts] + [f"{prefix}.shared_experts"] * with_shared
        gate_up = [(f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight") for expert in held]
        self.w13 = ckpt.stack(gate_up, (size, hidden), Part(rows=part))
        self.w2 = ckpt.stack([(f"{expert}.down_proj.weight",) for expert in held], (hidden, size), Part(cols=part))

    def __call__(self, h: Operand, weights: Tensor, ids: Tensor) -> Tensor:
        """h [G, D], weights float32 [G, K], ids int32 [G, K] -> [G, D], the sum of this rank's experts."""
        return moe_experts(
            h,
            weights,
            self.slots(ids),
            self.w13,
            self.w2,
            shared_expert=self.with_shared,
            num_experts=self.num_experts,
        )
