"""DeepSeekMoE (V3 paper, eq. 12-16): h' = shared(h) + sum over the chosen experts of weight_e * expert_e(h).

Letters: T tokens, D hidden size, E experts of this rank, I moe_intermediate_size, K experts per token.
"""

from __future__ import annotations

import torch
from millrace_kernels.linear import linear
from millrace_kernels.moe_experts import moe_experts
from millrace_kernels.moe_gate import moe_gate
from torch import Tensor

from millrace_serve.model.config import ModelConfig
from millrace_serve.model.expert_exchange import ExpertExchange
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.layers import Mlp
from millrace_serve.model.parallel import ParallelDims, check_divides
from millrace_serve.model.weights import Checkpoint


class Gate:
    """The router runs in FP32: a rounding difference here changes which experts run."""

    def __init__(self, ckpt: Checkpoint, config: ModelConfig, prefix: str) -> None:
        experts = config.n_routed_experts
        self.config = config
        self.weight = ckpt.tensor(f"{prefix}.weight", (experts, config.hidden_size), dtype=torch.float32)
        self.bias = ckpt.tensor(f"{prefix}.e_score_correction_bias", (experts,), dtype=torch.float32)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] -> weights float32 [T, K], experts int64 [T, K]"""
        config = self.config
        return moe_gate(
            linear(x.float(), self.weight),
            self.bias,
            n_group=config.n_group,
            topk_group=config.topk_group,
            top_k=config.num_experts_per_tok,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
        )


class Moe:
    def __init__(
        self, ckpt: Checkpoint, config: ModelConfig, dims: ParallelDims, exchange: ExpertExchange, prefix: str
    ) -> None:
        self.dims, self.exchange = dims, exchange
        self.gate = Gate(ckpt, config, f"{prefix}.gate")
        self.first_expert, self.w13, self.w2 = load_experts(ckpt, config, dims, f"{prefix}.experts")
        shared = config.n_shared_experts * config.moe_intermediate_size
        self.shared_experts = (
            Mlp(ckpt, dims, f"{prefix}.shared_experts", config.hidden_size, shared) if shared else None
        )

    def __call__(self, x: Tensor, inputs: ForwardInput) -> Tensor:
        """x [T, D] -> [T, D]"""
        weights, experts = self.gate(x)
        experts[inputs.num_tokens :] = -1  # padding rows must not load an expert
        seen = self.exchange.dispatch(x, weights, experts, inputs)
        out = self.exchange.combine(moe_experts(*seen, self.w13, self.w2, self.first_expert), inputs)
        if self.shared_experts is not None:
            out = out + self.shared_experts.partial(x)
        return self.dims.tp_all_reduce(out)


class DenseMlp:
    """The MLP of the first layers, in the place of Moe."""

    def __init__(self, ckpt: Checkpoint, config: ModelConfig, dims: ParallelDims, prefix: str) -> None:
        self.dims = dims
        self.mlp = Mlp(ckpt, dims, prefix, config.hidden_size, config.intermediate_size)

    def __call__(self, x: Tensor, inputs: ForwardInput) -> Tensor:
        return self.dims.tp_all_reduce(self.mlp.partial(x))


def load_experts(ckpt: Checkpoint, config: ModelConfig, dims: ParallelDims, prefix: str) -> tuple[int, Tensor, Tensor]:
    """first expert of this rank, w13 [E, 2I, D], w2 [E, D, I]"""
    count = check_divides("n_routed_experts", config.n_routed_experts, "tp * dp", dims.ep_size)
    first = dims.ep_rank * count
    hidden, size = config.hidden_size, config.moe_intermediate_size
    shapes = {"gate_proj": (size, hidden), "up_proj": (size, hidden), "down_proj": (hidden, size)}
    w13 = torch.empty(count, 2 * size, hidden, device=ckpt.device, dtype=ckpt.dtype)
    w2 = torch.empty(count, hidden, size, device=ckpt.device, dtype=ckpt.dtype)
    for expert in range(config.n_routed_experts):
        names = {name: f"{prefix}.{expert}.{name}.weight" for name in shapes}
        if not first <= expert < first + count:
            for name, shape in shapes.items():
                ckpt.claim(names[name], shape)
            continue
        targets = {
            "gate_proj": w13[expert - first, :size],
            "up_proj": w13[expert - first, size:],
            "down_proj": w2[expert - first],
        }
        for name, shape in shapes.items():
            targets[name].copy_(ckpt.tensor(names[name], shape))
    return first, w13, w2
