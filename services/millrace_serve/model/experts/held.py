"""The experts of one layer that this rank holds."""

from typing import NamedTuple

from millrace_kernels.fp8 import Operand
from millrace_kernels.moe_experts import moe_experts
from torch import Tensor

from millrace_serve.model.config import ModelConfig
from millrace_serve.model.eplb.placement import ExpertPlacement, SlotMap
from millrace_serve.model.parallel import ParallelDims, check_divides
from millrace_serve.model.weights import Part, Weights


class ExpertLayer(NamedTuple):
    ckpt: Weights
    config: ModelConfig
    dims: ParallelDims
    placement: ExpertPlacement
    number: int


def fuses_shared(layer: ExpertLayer) -> bool:
    """Whether the shared expert can be one more of this rank's experts: it has their size, and the rank as much of it.

    Whole experts on several TP ranks would need the whole shared expert on each of them, not a part: more memory, and
    few tokens would read all of it on one rank.
    """
    same_part = layer.dims.tp == 1 or layer.dims.expert_tp
    return layer.ckpt.kept.fp8 and layer.config.n_shared_experts == 1 and same_part


class HeldExperts:
    """w13 [S, 2I, D] and w2 [S, D, I] of the rank's S slots, and of the shared expert at the end.

    With `expert_tp` the rank has a part of each: rows of w13, columns of w2.
    """

    WEIGHTS = "w13", "w2", "slots"

    def __init__(self, layer: ExpertLayer, *, with_shared: bool) -> None:
        ckpt, config, dims, placement, number = layer
        self.num_experts = config.n_routed_experts  # routed experts of the model
        self.with_shared = with_shared
        self.slots = SlotMap(placement, number, dims.ep_rank, ckpt.device)
        self.num_slots = placement.experts.shape[2]
        experts, prefix = placement.experts[number, dims.ep_rank].tolist(), f"model.layers.{number}.mlp"
        hidden, size, part = config.hidden_size, config.moe_intermediate_size, None
        if dims.expert_tp:
            width = check_divides("moe_intermediate_size", size, "tp", dims.tp)
            part = (dims.tp_rank * width, (dims.tp_rank + 1) * width)
        for expert in sorted({*range(config.n_routed_experts)} - {*experts}):
            for name, shape in (("gate", (size, hidden)), ("up", (size, hidden)), ("down", (hidden, size))):
                ckpt.claim(f"{prefix}.experts.{expert}.{name}_proj.weight", shape)
        held = [f"{prefix}.experts.{expert}" for expert in experts] + [f"{prefix}.shared_experts"] * with_shared
        gate_up = [(f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight") for expert in held]
        self.w13 = ckpt.stack(gate_up, (size, hidden), Part(rows=part))
        self.w2 = ckpt.stack([(f"{expert}.down_proj.weight",) for expert in held], (hidden, size), Part(cols=part))

    def __call__(self, h: Operand, weights: Tensor, ids: Tensor) -> Tensor:
        """h [G, D], weights float32 [G, K], ids int32 [G, K] -> [G, D], the sum of this rank's experts."""
        return moe_experts(
            h, weights, self.slots(ids), self.w13, self.w2, shared_expert=self.with_shared, num_experts=self.num_experts
        )

    def placed(self, h: Operand, weights: Tensor, slots: Tensor, out: Tensor) -> None:
        """As a call, into `out` and with slots int32 [G, C] of this rank, which name the shared expert as the last."""
        choices = slots.shape[1]
        expected_by = self.num_experts * choices // (choices - self.with_shared)  # few rows choose the shared expert
        moe_experts(h, weights, slots, self.w13, self.w2, num_experts=expected_by, out=out)
