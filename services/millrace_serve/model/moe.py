"""DeepSeekMoE (V3 paper, eq. 12-16): h' = shared(h) + sum over the chosen experts of weight_e * expert_e(h).

Letters: T tokens, D hidden size, E experts of this rank, I moe_intermediate_size, K experts per token.
"""

from __future__ import annotations

import torch
from millrace_kernels.fp8 import Fp8, Operand
from millrace_kernels.moe_experts import moe_experts
from millrace_kernels.moe_gate import gate_logits, moe_gate
from torch import Tensor

from millrace_serve.model.config import ModelConfig
from millrace_serve.model.expert_exchange import ExpertExchange
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.layers import Mlp
from millrace_serve.model.parallel import ParallelDims, check_divides
from millrace_serve.model.weights import Weights


class Gate:
    """Products are exact and sums FP32: a rounding difference here changes which experts run."""

    def __init__(self, ckpt: Weights, config: ModelConfig, prefix: str) -> None:
        experts = config.n_routed_experts
        self.config = config
        # published in BF16, so BF16 x BF16 loses nothing
        dtype = torch.bfloat16 if ckpt.fp8 else torch.float32
        self.weight = ckpt.tensor(f"{prefix}.weight", (experts, config.hidden_size), dtype=dtype)
        self.bias = ckpt.tensor(f"{prefix}.e_score_correction_bias", (experts,), dtype=torch.float32)

    def __call__(self, x: Tensor, num_tokens: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [T, D] -> weights float32 [T, K], experts int32 [T, K]; rows from num_tokens (int32 [1]) on choose -1."""
        config = self.config
        return moe_gate(
            gate_logits(x, self.weight),
            self.bias,
            n_group=config.n_group,
            topk_group=config.topk_group,
            top_k=config.num_experts_per_tok,
            norm_topk_prob=config.norm_topk_prob,
            routed_scaling_factor=config.routed_scaling_factor,
            num_tokens=num_tokens,
        )


class Moe:
    """The shared expert is one more row of the expert stack where it has their size here and every token is at home;
    that spares its own GEMMs. Elsewhere it is an Mlp of its own.
    """

    def __init__(
        self, ckpt: Weights, config: ModelConfig, dims: ParallelDims, exchange: ExpertExchange, prefix: str
    ) -> None:
        self.dims, self.exchange = dims, exchange
        self.num_experts = config.n_routed_experts  # that the tokens seen here are spread over
        self.gate = Gate(ckpt, config, f"{prefix}.gate")
        sharded_alike = dims.tp == 1 or dims.expert_tp
        self.fused_shared = ckpt.fp8 and config.n_shared_experts == 1 and exchange.local and sharded_alike
        self.first_expert, self.w13, self.w2 = load_experts(ckpt, config, dims, prefix, self.fused_shared)
        self.shared_experts = None
        if config.n_shared_experts and not self.fused_shared:
            size = config.n_shared_experts * config.moe_intermediate_size
            self.shared_experts = Mlp(ckpt, dims, f"{prefix}.shared_experts", config.hidden_size, size)

    def __call__(self, h: Operand, inputs: ForwardInput) -> Tensor:
        """h [T, D] -> [T, D]"""
        assert h.plain is not None
        weights, experts = self.gate(h.plain, _real_tokens(inputs))
        seen = self.exchange.dispatch(h, weights, experts, inputs)
        h_seen, w_seen, ids = seen
        ids = ids - self.first_expert
        ids = ids.masked_fill((ids < 0) | (ids >= len_of(self.w13) - self.fused_shared), -1)
        routed = moe_experts(
            h_seen,
            w_seen,
            ids,
            self.w13,
            self.w2,
            shared_expert=self.fused_shared,
            num_experts=self.num_experts,
        )
        out = self.exchange.combine(routed, inputs)
        if self.shared_experts is not None:
            out = out + self.shared_experts.partial(h)
        return self.dims.tp_all_reduce(out)


def len_of(w: Tensor | Fp8) -> int:
    return (w.data if isinstance(w, Fp8) else w).shape[0]


class DenseMlp:
    """The MLP of the first layers, in the place of Moe."""

    def __init__(self, ckpt: Weights, config: ModelConfig, dims: ParallelDims, prefix: str) -> None:
        self.dims = dims
        self.mlp = Mlp(ckpt, dims, prefix, config.hidden_size, config.intermediate_size)

    def __call__(self, h: Operand, inputs: ForwardInput) -> Tensor:
        return self.dims.tp_all_reduce(self.mlp.partial(h))


def _real_tokens(inputs: ForwardInput) -> Tensor | None:
    """int32 [1] on the device; None when there is no padding: a padding row must not load an expert."""
    if inputs.num_tokens_device is None and inputs.num_tokens < inputs.token_ids.shape[0]:
        return torch.full((1,), inputs.num_tokens, dtype=torch.int32, device=inputs.device)
    return inputs.num_tokens_device


def load_experts(
    ckpt: Weights, config: ModelConfig, dims: ParallelDims, prefix: str, with_shared: bool
) -> tuple[int, Tensor | Fp8, Tensor | Fp8]:
    """first expert of this rank, w13 [E, 2I, D], w2 [E, D, I]; with the shared expert as one more at the end.

    Whole experts are spread over all ranks, or with `expert_tp` every rank holds a part of each.
    """
    hidden, size = config.hidden_size, config.moe_intermediate_size
    first, count, part = 0, config.n_routed_experts, None
    if dims.expert_tp:
        width = check_divides("moe_intermediate_size", size, "tp", dims.tp)
        part = (dims.tp_rank * width, (dims.tp_rank + 1) * width)
    else:
        count = check_divides("n_routed_experts", count, "tp * dp", dims.ep_size)
        first = dims.ep_rank * count
    for expert in (*range(first), *range(first + count, config.n_routed_experts)):
        ckpt.claim(f"{prefix}.experts.{expert}.gate_proj.weight", (size, hidden))
        ckpt.claim(f"{prefix}.experts.{expert}.up_proj.weight", (size, hidden))
        ckpt.claim(f"{prefix}.experts.{expert}.down_proj.weight", (hidden, size))
    held = [f"{prefix}.experts.{expert}" for expert in range(first, first + count)]
    if with_shared:
        held.append(f"{prefix}.shared_experts")
    gate_up = [(f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight") for expert in held]
    w13 = ckpt.stack(gate_up, (size, hidden), rows=part)
    w2 = ckpt.stack([(f"{expert}.down_proj.weight",) for expert in held], (hidden, size), cols=part)
    return first, w13, w2
