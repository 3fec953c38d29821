"""h = x + attention(norm(x));  out = h + mlp(norm(h)). Letters: T tokens, S sampled rows, D hidden size."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from millrace_serve.model.attn_step import AttnStep
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.experts.routed import MakeExperts
from millrace_serve.model.layers import RmsNorm
from millrace_serve.model.mla import Mla
from millrace_serve.model.moe import DenseMlp, Moe
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.weights import Weights


class DecoderLayer:
    def __init__(
        self, ckpt: Weights, config: ModelConfig, dims: ParallelDims, make_experts: MakeExperts, layer: int
    ) -> None:
        prefix, hidden, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.self_attn = Mla(ckpt, config, dims, f"{prefix}.self_attn")
        self.mlp: Moe | DenseMlp
        if config.is_moe(layer):
            self.mlp = Moe(ckpt, config, dims, make_experts, layer)
        else:
            self.mlp = DenseMlp(ckpt, config, dims, f"{prefix}.mlp")

        def norm(name: str, *, plain: bool) -> RmsNorm:
            return RmsNorm(ckpt, f"{prefix}.{name}", hidden, eps, plain=plain)

        self.input_layernorm = norm("input_layernorm", plain=self.self_attn.reads_plain)
        self.post_attention_layernorm = norm("post_attention_layernorm", plain=self.mlp.reads_plain)
        self.sampled_only = False  # whether the MLP of a step with prompt chunks leaves out rows that are not sampled

    def __call__(self, x: Tensor, residual: Tensor | None, step: AttnStep, kv: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, D] and the residual stream still to be added to it, None in the first layer -> the same, a layer later.

        Leaving the addition to the next norm lets both be one pass over memory. With `sampled_only`, rows of prompt
        chunks that are not sampled are left without the MLP's output.
        """
        h, residual = self.input_layernorm.operand(x, residual)
        attended, inputs = self.self_attn(h, step, kv), step.inputs
        if self.sampled_only and inputs.attn.num_decode < inputs.attn.num_seqs:
            rows = inputs.sample_rows
            h, chosen = self.post_attention_layernorm.operand(attended[rows], residual[rows])
            out = self.mlp(h, replace(inputs, num_tokens=None))  # none of these rows is padding
            return attended.index_copy_(0, rows, out), residual.index_copy_(0, rows, chosen)
        h, residual = self.post_attention_layernorm.operand(attended, residual)
        return self.mlp(h, inputs), residual
