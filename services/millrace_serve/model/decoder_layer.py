"""h = x + attention(norm(x));  out = h + mlp(norm(h)). Letters: T tokens, D hidden size."""

from __future__ import annotations

from millrace_kernels.fp8 import Fp8
from torch import Tensor

from millrace_serve.model.attn_step import AttnStep
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.expert_exchange import ExpertExchange
from millrace_serve.model.layers import RmsNorm
from millrace_serve.model.mla import Mla
from millrace_serve.model.moe import DenseMlp, Moe
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.weights import Weights


class DecoderLayer:
    def __init__(
        self, ckpt: Weights, config: ModelConfig, dims: ParallelDims, exchange: ExpertExchange, layer: int
    ) -> None:
        prefix, eps = f"model.layers.{layer}", config.rms_norm_eps
        self.input_layernorm = RmsNorm(ckpt, f"{prefix}.input_layernorm", config.hidden_size, eps)
        self.self_attn = Mla(ckpt, config, dims, f"{prefix}.self_attn")
        self.post_attention_layernorm = RmsNorm(ckpt, f"{prefix}.post_attention_layernorm", config.hidden_size, eps)
        self.mlp: Moe | DenseMlp
        if config.is_moe(layer):
            self.mlp = Moe(ckpt, config, dims, exchange, f"{prefix}.mlp")
        else:
            self.mlp = DenseMlp(ckpt, config, dims, f"{prefix}.mlp")

        self._plain_input = not isinstance(self.self_attn.q_kv_a_proj, Fp8)

    def __call__(
        self, x: Tensor, residual: Tensor | None, step: AttnStep, kv: Tensor, sampled: AttnStep | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [T, D] and the residual stream still to be added to it, None in the first layer -> the same, a layer later.

        Leaving the addition to the next norm lets both be one pass over memory. With `sampled` all T rows are cached,
        and only its S rows go on: -> [S, D].
        """
        if residual is None:
            h, residual = self.input_layernorm.operand(x, plain=self._plain_input), x
        else:
            h, residual = self.input_layernorm.add_operand(x, residual, plain=self._plain_input)
        attended = self.self_attn(h, step, kv, sampled)
        if sampled is not None:
            residual, step = residual[step.inputs.sample_rows], sampled
        h, residual = self.post_attention_layernorm.add_operand(attended, residual)
        return self.mlp(h, step.inputs), residual
