"""DeepSeek-V3: embedding, decoder layers, norm, head. One call runs one step of the engine.

Letters: T tokens of the step, S sampled rows, D hidden size, L layers of the KV pool.
"""

from __future__ import annotations

import functools
import logging
import time
from pathlib import Path

import torch
from millrace_kernels.scratch import Scratch
from torch import Tensor

from millrace_serve.model.attn_step import AttnStep, FormThresholds, HeadShape
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.decoder_layer import DecoderLayer
from millrace_serve.model.experts.gather import GatherExperts
from millrace_serve.model.experts.local import LocalExperts
from millrace_serve.model.experts.placement import Placement
from millrace_serve.model.experts.routed import Implementation
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.layers import RmsNorm, VocabParallel
from millrace_serve.model.mtp import Mtp
from millrace_serve.model.parallel import ParallelDims, check_divides
from millrace_serve.model.weights import Checkpoint, Weights, keeps_fp8
from millrace_serve.model.yarn import rope_tables

log = logging.getLogger(__name__)


class DeepseekV3:
    def __init__(
        self,
        ckpt: Weights,
        config: ModelConfig,
        dims: ParallelDims,
        thresholds: FormThresholds | None = None,
        experts: Implementation | None = None,
    ) -> None:
        """`thresholds`: None takes what was measured on a device of this kind."""
        self.config, self.dims, self.dtype = config, dims, ckpt.dtype
        self.rope_tables = rope_tables(config, ckpt.device)
        self.scratch = Scratch(ckpt.device)
        num_heads = check_divides("num_attention_heads", config.num_attention_heads, "tp", dims.tp)
        self.thresholds = thresholds or FormThresholds.measured(ckpt.device, num_heads)
        self.heads = HeadShape(num_heads, config.qk_head_dim, config.v_head_dim)
        placement = Placement.contiguous(config.num_kv_layers, config.n_routed_experts, dims.ep_size)
        implementation = experts or (LocalExperts if dims.dp == 1 else GatherExperts)
        make = functools.partial(implementation, ckpt, config, dims, placement)
        self.embed_tokens = VocabParallel(ckpt, config, dims, "model.embed_tokens.weight")
        self.layers = [DecoderLayer(ckpt, config, dims, make, layer) for layer in range(config.num_hidden_layers)]
        self.norm = RmsNorm(ckpt, "model.norm", config.hidden_size, config.rms_norm_eps)
        self.lm_head = VocabParallel(ckpt, config, dims, "lm_head.weight")
        self.mtp = Mtp(ckpt, config, dims, make) if config.num_nextn_predict_layers else None
        self.layers[-1].sampled_only = self.mtp is None and self.layers[-1].mlp.local

    @torch.inference_mode()
    def forward(self, inputs: ForwardInput, kv: Tensor) -> Tensor:
        """Writes the step's rows into the pool and returns the hidden states after the final norm, [T, D].

        Only the sampled rows of prompt chunks are hidden states, unless there is an MTP layer, which needs all of them.

        Args:
            kv: [num_pages, L, page_size, kv_lora_rank + qk_rope_head_dim], L >= num_kv_layers; a page is contiguous.
        """
        with self.scratch.step():
            step = self._attn_step(inputs, kv[:, 0])
            x, residual = self.embed_tokens.embed(inputs.token_ids), None
            for index, layer in enumerate(self.layers):
                x, residual = layer(x, residual, step, kv[:, index])
            assert residual is not None
            return self.norm.add(x, residual)[0]

    @torch.inference_mode()
    def forward_mtp(self, inputs: ForwardInput, hidden: Tensor, kv: Tensor) -> Tensor:
        """One draft step: tokens t_{i+1} at positions i and their `hidden` h_i [T, D] -> [T, D] for `logits`.

        The MTP layer is the last layer of the pool, so it has a page table and slots like every other.
        """
        assert self.mtp is not None, "the checkpoint has no MTP layer"
        layer = kv[:, self.config.num_hidden_layers]
        return self.mtp(self.embed_tokens.embed(inputs.token_ids), hidden, self._attn_step(inputs, layer), layer)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, D], the sampled rows of what a forward returned -> float32 [S, vocab_size] on every rank."""
        return self.lm_head.logits(hidden)

    def _attn_step(self, inputs: ForwardInput, kv: Tensor) -> AttnStep:
        return AttnStep.prepare(inputs, self.rope_tables, self.thresholds, self.heads, kv, self.dtype)


def load_model(
    path: str | Path,
    dims: ParallelDims,
    device: torch.device,
    dtype: torch.dtype,
    thresholds: FormThresholds | None = None,
    *,
    keep_fp8: bool | None = None,
    mtp: bool = True,
) -> DeepseekV3:
    """Reads this rank's part of a checkpoint directory.

    Args:
        keep_fp8: GEMMs run on the FP8 weights themselves; otherwise they are dequantised to `dtype`. None: `keeps_fp8`.
        mtp: whether the MTP layer is loaded, where the checkpoint has one.

    Raises:
        ConfigError: config.json is unusable.
        CheckpointError: the tensors are not those that config.json describes.
        ValueError: the config does not divide by `dims`.
    """
    started = time.monotonic()
    config = ModelConfig.load(path)
    keep = keeps_fp8(config, device, dtype) if keep_fp8 is None else keep_fp8
    ckpt = Checkpoint(path, config, device, dtype, keep_fp8=keep)
    if config.num_nextn_predict_layers and not mtp:
        config = config.without_mtp()
        ckpt.skip(f"model.layers.{config.num_hidden_layers}.")
    model = DeepseekV3(ckpt, config, dims, thresholds)
    ckpt.finish()
    log.info("model loaded path=%s rank=%d dtype=%s seconds=%.1f", path, dims.rank, dtype, time.monotonic() - started)
    return model
