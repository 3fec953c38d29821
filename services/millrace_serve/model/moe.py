"""DeepSeekMoE (V3 paper, eq. 12-16): h' = shared(h) + sum over the chosen experts of weight_e * expert_e(h).

Letters: T tokens, D hidden size, K experts per token.
"""

from dataclasses import replace

import torch
from millrace_kernels.fp8 import Fp8, Operand
from millrace_kernels.moe_gate import GateRule, gate_logits, moe_gate
from torch import Tensor

from millrace_serve.model.config import ModelConfig
from millrace_serve.model.experts.routed import MakeExperts
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.layers import Mlp
from millrace_serve.model.parallel import ParallelDims, check_divides
from millrace_serve.model.weights import Weights


class Gate:
    """Products are exact and sums FP32, because a rounding difference here changes the choice of experts."""

    WEIGHTS = "weight", "bias"

    def __init__(self, ckpt: Weights, config: ModelConfig, prefix: str) -> None:
        experts = config.n_routed_experts
        self.rule = GateRule(
            config.n_group,
            config.topk_group,
            config.num_experts_per_tok,
            config.norm_topk_prob,
            config.routed_scaling_factor,
        )
        # published in BF16, so BF16 x BF16 loses nothing
        dtype = torch.bfloat16 if ckpt.kept.fp8 else torch.float32
        self.weight = ckpt.tensor(f"{prefix}.weight", (experts, config.hidden_size), dtype=dtype)
        self.bias = ckpt.tensor(f"{prefix}.e_score_correction_bias", (experts,), dtype=torch.float32)
        self.loads: Tensor | None = None  # int32 [E], choices of real rows are added to it

    def __call__(self, x: Tensor, num_tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [T, D] -> weights float32 [T, K], experts int32 [T, K]; rows from num_tokens (int32 [1]) on choose -1."""
        return moe_gate(gate_logits(x, self.weight), self.bias, self.rule, num_tokens, self.loads)


class Moe:
    WEIGHTS = "gate", "routed", "shared_experts"
    reads_plain = True  # by the gate

    def __init__(
        self, ckpt: Weights, config: ModelConfig, dims: ParallelDims, make_experts: MakeExperts, layer: int
    ) -> None:
        prefix = f"model.layers.{layer}.mlp"
        self.dims = dims
        self.gate = Gate(ckpt, config, f"{prefix}.gate")
        self.routed = make_experts(layer)
        self.local, self.tp_partial = self.routed.local, self.routed.tp_partial
        self.shared_experts = None
        if config.n_shared_experts and not self.routed.fuses_shared:
            size = config.n_shared_experts * config.moe_intermediate_size
            self.shared_experts = Mlp(ckpt, dims, f"{prefix}.shared_experts", config.hidden_size, size)

    def __call__(self, h: Operand, inputs: ForwardInput) -> Tensor:
        """h [T, D] -> [T, D], with `tp_partial` this rank's part of a sum over TP."""
        assert h.plain is not None
        finish = self.routed.begin(h, *self.gate(h.plain, inputs.num_tokens), inputs)
        shared = None if self.shared_experts is None else self.shared_experts.partial(h)
        out = finish()
        if shared is None:
            return out
        return out + (shared if self.tp_partial else self.dims.tp_all_reduce(shared))


class DenseMlp:
    """The MLP of the first layers, in the place of Moe. With `dense_tp` = 1 every rank has the whole sum by itself."""

    WEIGHTS = ("mlp",)
    local = True

    def __init__(self, ckpt: Weights, config: ModelConfig, dims: ParallelDims, prefix: str) -> None:
        size = dims.dense_tp or dims.tp
        self.tp_partial, self.copies = size > 1 or dims.tp == 1, check_divides("tp", dims.tp, "dense_tp", size)
        part = replace(dims, rank=dims.tp_rank % size, tp=size)
        self.mlp = Mlp(ckpt, part, prefix, config.hidden_size, config.intermediate_size)
        self.reads_plain = not isinstance(self.mlp.gate_up_proj, Fp8)

    def __call__(self, h: Operand, inputs: ForwardInput) -> Tensor:
        out = self.mlp.partial(h)
        return out / self.copies if self.tp_partial and self.copies > 1 else out  # a sum over tp counts all copies
