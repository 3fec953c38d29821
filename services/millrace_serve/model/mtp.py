"""Multi-token prediction (V3 paper, section 2.2): one more decoder layer that predicts the token after the next.

    h'_i = W_eh [norm_e(emb(t_{i+1})) | norm_h(h_i)]    out_i = norm(layer(h'_i))    logits of t_{i+2} = head(out_i)

Embedding and head are the main model's.
"""

import torch
from millrace_kernels.linear import linear
from torch import Tensor

from millrace_serve.model.attn_step import AttnStep
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.decoder_layer import DecoderLayer
from millrace_serve.model.experts.routed import MakeExperts
from millrace_serve.model.layers import RmsNorm
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.reduce import TpReduce
from millrace_serve.model.weights import Weights


class Mtp:
    WEIGHTS = "enorm", "hnorm", "eh_proj", "layer", "norm"

    def __init__(
        self, ckpt: Weights, config: ModelConfig, dims: ParallelDims, reduce: TpReduce, make_experts: MakeExperts
    ) -> None:
        layer, hidden, eps = config.num_hidden_layers, config.hidden_size, config.rms_norm_eps
        prefix = f"model.layers.{layer}"
        self.reduce = reduce
        self.enorm = RmsNorm(ckpt, f"{prefix}.enorm", hidden, eps, quant=False)
        self.hnorm = RmsNorm(ckpt, f"{prefix}.hnorm", hidden, eps, quant=False)
        self.eh_proj = ckpt.tensor(f"{prefix}.eh_proj.weight", (hidden, 2 * hidden))
        self.layer = DecoderLayer(ckpt, config, dims, reduce, make_experts, layer)
        self.norm = RmsNorm(ckpt, f"{prefix}.shared_head.norm", hidden, eps, quant=False)
        for copy in ("embed_tokens", "shared_head.head"):  # published beside the layer; equal to the main ones
            ckpt.claim(f"{prefix}.{copy}.weight", (config.vocab_size, hidden), optional=True)

    def __call__(self, embedded: Tensor, hidden: Tensor, step: AttnStep, kv: Tensor) -> Tensor:
        """embedded [T, D] of tokens t_{i+1}, this rank's part of a sum -> [T, D].

        hidden: [T, D] of the main model, or of the last draft, at i.
        """
        first, second = self.reduce(self.enorm, embedded, None)[0].plain, self.hnorm.operand(hidden, None)[0].plain
        assert first is not None and second is not None
        x = linear(torch.cat((first, second), dim=-1), self.eh_proj)
        h, residual = self.layer.input_layernorm.operand(x, None)
        out, _ = self.layer(h, residual, step, kv, self.norm)
        assert out.plain is not None
        return out.plain
