"""h = x + attention(norm(x));  out = h + mlp(norm(h)). Letters: T tokens, S sampled rows, D hidden size."""

from dataclasses import replace

from millrace_kernels.fp8 import Operand
from torch import Tensor

from millrace_serve.model.attn_step import AttnStep
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.experts.routed import MakeExperts
from millrace_serve.model.layers import RmsNorm
from millrace_serve.model.mla import Mla
from millrace_serve.model.moe import DenseMlp, Moe
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.reduce import TpReduce
from millrace_serve.model.weights import Weights


class DecoderLayer:
    WEIGHTS = "self_attn", "mlp", "input_layernorm", "post_attention_layernorm"

    def __init__(
        self,
        ckpt: Weights,
        config: ModelConfig,
        dims: ParallelDims,
        reduce: TpReduce,
        make_experts: MakeExperts,
        layer: int,
    ) -> None:
        self.reduce = reduce
        prefix, hidden, eps = f"model.layers.{layer}", config.hidden_size, config.rms_norm_eps
        self.self_attn = Mla(ckpt, config, dims, layer)
        self.mlp: Moe | DenseMlp
        if config.is_moe(layer):
            self.mlp = Moe(ckpt, config, dims, make_experts, layer)
        else:
            self.mlp = DenseMlp(ckpt, config, dims, f"{prefix}.mlp")

        self.mlp_partial = self.mlp.tp_partial

        def norm(name: str, *, plain: bool) -> RmsNorm:
            return RmsNorm(ckpt, f"{prefix}.{name}", hidden, eps, plain=plain)

        self.input_layernorm = norm("input_layernorm", plain=self.self_attn.reads_plain)
        self.post_attention_layernorm = norm("post_attention_layernorm", plain=self.mlp.reads_plain)
        self.sampled_only = False  # whether the MLP of a step with prompt chunks leaves out rows that are not sampled
        self.before_sampled = False  # whether the next layer does so, which then reads any rows of the residual

    def __call__(
        self, h: Operand, residual: Tensor, step: AttnStep, kv: Tensor, next_norm: RmsNorm
    ) -> tuple[Operand, Tensor]:
        """h [T, D], normed by `input_layernorm`, and the residual stream [T, D] -> the same, normed by `next_norm`.

        The sum over ranks, the residual's addition and the next norm are one pass over memory, so they come together.
        With `sampled_only`, rows of prompt chunks that are not sampled are left without the MLP's output.
        """
        attended, inputs = self.self_attn(h, step, kv), step.inputs
        norm, whole = self.post_attention_layernorm, not self.mlp_partial
        chunks = inputs.attn.num_decode < inputs.attn.num_seqs
        if self.sampled_only and chunks:
            rows = inputs.sample_rows
            h, chosen = self.reduce(norm, attended[rows], residual[rows], whole=True)
            out = self.mlp(h, replace(inputs, num_tokens=None))  # none of these rows is padding
            return self.reduce(next_norm, attended.index_copy_(0, rows, out), residual.index_copy_(0, rows, chosen))
        h, residual = self.reduce(norm, attended, residual, whole=whole)
        out = self.mlp(h, inputs)
        if not self.mlp_partial:
            return next_norm.operand(out, residual)
        return self.reduce(next_norm, out, residual, whole=self.before_sampled and chunks)
