"""DeepSeek-V3: embedding, decoder layers, norm, head. One call runs one step of the engine.

Letters: T tokens of the step, S sampled rows, D hidden size, L layers of the KV pool.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from millrace_kernels.mla_prefill import Heads
from millrace_kernels.scratch import Scratch
from torch import Tensor

from millrace_serve.model.attn_step import Attend, AttnStep, FormThresholds
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.decoder_layer import DecoderLayer
from millrace_serve.model.eplb.moving import Balancer
from millrace_serve.model.eplb.placement import ExpertPlacement
from millrace_serve.model.experts.gather import GatherExperts
from millrace_serve.model.experts.held import ExpertLayer
from millrace_serve.model.experts.local import LocalExperts
from millrace_serve.model.experts.routed import Implementation, MakeExperts
from millrace_serve.model.held_weights import ModelPart, overwrite
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.layers import RmsNorm, VocabParallel
from millrace_serve.model.moe import Moe
from millrace_serve.model.mtp import Mtp
from millrace_serve.model.parallel import ParallelDims, check_divides
from millrace_serve.model.quantised import runs_quantised
from millrace_serve.model.reduce import TpReduce
from millrace_serve.model.sparse_step import IndexPool
from millrace_serve.model.weights import Checkpoint, Weights
from millrace_serve.model.yarn import rope_tables

log = logging.getLogger(__name__)
P = TypeVar("P", bound=ModelPart)


class DeepseekV3:
    WEIGHTS = "rope_tables", "embed_tokens", "layers", "norm", "lm_head", "mtp"

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
        self.heads = Heads(num_heads, config.qk_head_dim, config.v_head_dim)
        num_layers, num_experts = config.num_kv_layers, config.n_routed_experts
        placement = ExpertPlacement.contiguous(num_layers, num_experts, dims.ep_size, dims.redundant_experts)
        implementation = experts or (LocalExperts if dims.dp == 1 else GatherExperts)

        def experts_of(ckpt: Weights) -> MakeExperts:
            return lambda layer: implementation(ExpertLayer(ckpt, config, dims, placement, layer))

        def built(make: Callable[[Weights], P]) -> P:
            part = make(ckpt)
            self._parts.append((part, make))
            return part

        def decoder_layer(layer: int) -> DecoderLayer:
            return built(lambda ckpt: DecoderLayer(ckpt, config, dims, self.reduce, experts_of(ckpt), layer))

        self._parts: list[
            tuple[ModelPart, Callable[[Weights], ModelPart]]
        ] = []  # and how to make each of other weights
        self.reduce = TpReduce(dims)
        self.embed_tokens = built(lambda ckpt: VocabParallel(ckpt, config, dims, "model.embed_tokens.weight"))
        self.layers = [decoder_layer(layer) for layer in range(config.num_hidden_layers)]
        self.norm = built(
            lambda ckpt: RmsNorm(ckpt, "model.norm", config.hidden_size, config.rms_norm_eps, quant=False)
        )
        self.lm_head = built(lambda ckpt: VocabParallel(ckpt, config, dims, "lm_head.weight"))
        self.mtp = None
        if config.num_nextn_predict_layers:
            self.mtp = built(lambda ckpt: Mtp(ckpt, config, dims, self.reduce, experts_of(ckpt)))
        layers = self.layers if self.mtp is None else [*self.layers, self.mtp.layer]
        moes = {index: layer.mlp for index, layer in enumerate(layers) if isinstance(layer.mlp, Moe)}
        self.balancer = Balancer(dims, placement, moes) if dims.redundant_experts else None
        last = self.layers[-1]
        last.sampled_only = self.mtp is None and last.mlp.local and last.mlp.tp_partial
        for layer in self.layers[-2:-1]:
            layer.before_sampled = last.sampled_only

    @torch.inference_mode()
    def load(self, ckpt: Weights) -> None:
        """Takes other weights of the same configuration, in the places of these. Parts are made again one by one, so
        all that is derived from a weight is too, and experts are back on the ranks where they began.
        """
        for part, make in self._parts:
            overwrite(part, make(ckpt), type(part).__name__)
        if self.balancer is not None:
            self.balancer.restart()

    @torch.inference_mode()
    def forward(self, inputs: ForwardInput, kv: Tensor, attend: Attend | None = None) -> Tensor:
        """Writes the step's rows into the pool and returns the hidden states after the final norm, [T, D].

        Only the sampled rows of prompt chunks are hidden states, unless there is an MTP layer, which needs all of them.

        Args:
            kv: [num_pages, L, page_size, kv_lora_rank + qk_rope_head_dim], L >= num_kv_layers; a page is contiguous.
                With sparse attention index keys lie behind it (`IndexPool`).
            attend: in the place of each layer's attention, which is not sparse
        """
        with self.scratch.step():
            step = self.attn_step(inputs, kv)
            if attend is not None:
                step = replace(step, attend=attend)
            first, embedded = self.layers[0], self.embed_tokens.embed_partial(inputs.token_ids)
            h, residual = self.reduce(first.input_layernorm, embedded, None, whole=first.sampled_only)
            next_norms = *(layer.input_layernorm for layer in self.layers[1:]), self.norm
            for index, (layer, norm) in enumerate(zip(self.layers, next_norms, strict=True)):
                h, residual = layer(h, residual, step, kv[:, index], norm)
            assert h.plain is not None
            return h.plain

    @torch.inference_mode()
    def forward_mtp(self, inputs: ForwardInput, hidden: Tensor, kv: Tensor) -> Tensor:
        """One draft step: tokens t_{i+1} at positions i and their `hidden` h_i [T, D] -> [T, D] for `logits`.

        The MTP layer is the last layer of the pool, so it has a page table and slots like every other.
        """
        assert self.mtp is not None, "the checkpoint has no MTP layer"
        layer = kv[:, self.config.num_hidden_layers]
        embedded = self.embed_tokens.embed_partial(inputs.token_ids)
        return self.mtp(embedded, hidden, self.attn_step(inputs, kv), layer)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, D], the sampled rows of what a forward returned -> float32 [S, vocab_size] on every rank."""
        return self.lm_head.logits(hidden)

    def attn_step(self, inputs: ForwardInput, kv: Tensor) -> AttnStep:
        """What the layers' attention needs; kv: of all layers."""
        index, topk = IndexPool.of(kv, self.config), self.config.index_topk
        return AttnStep.prepare(
            inputs, self.rope_tables, self.thresholds, self.heads, kv[:, 0], self.dtype, index, topk
        )

    @property
    def captures_chunks(self) -> bool:
        """Whether a step with prompt chunks can be a graph but for its attention."""
        return all(layer.mlp.routed.captures_chunks for layer in self.layers if isinstance(layer.mlp, Moe))


def load_model(
    path: str | Path,
    dims: ParallelDims,
    device: torch.device,
    dtype: torch.dtype,
    thresholds: FormThresholds | None = None,
    *,
    keep_quantised: bool | None = None,
    mtp: bool = True,
    experts: Implementation | None = None,
) -> DeepseekV3:
    """Reads this rank's part of a checkpoint directory.

    Args:
        keep_quantised: GEMMs run on FP8 or INT8 weights themselves; otherwise they are dequantised to `dtype`. None:
            where kernels do (`runs_quantised`).
        mtp: whether the MTP layer is loaded, where the checkpoint has one.
        experts: None: `LocalExperts`, or `GatherExperts` for several replicas.

    Raises:
        ModelConfigError: config.json is unusable.
        CheckpointError: the tensors are not those that config.json describes.
        ValueError: the config does not divide by `dims`.
    """
    started = time.monotonic()
    with open_checkpoint(path, device, dtype, keep_quantised=keep_quantised, mtp=mtp) as (ckpt, config):
        model = DeepseekV3(ckpt, config, dims, thresholds, experts)
    log.info("model loaded path=%s rank=%d dtype=%s seconds=%.1f", path, dims.rank, dtype, time.monotonic() - started)
    return model


@contextlib.contextmanager
def open_checkpoint(
    path: str | Path, device: torch.device, dtype: torch.dtype, *, keep_quantised: bool | None = None, mtp: bool = True
) -> Iterator[tuple[Checkpoint, ModelConfig]]:
    """Its headers, and the configuration of the layers to load, as in `load_model`. All its tensors must be taken."""
    config = ModelConfig.load(path)
    keep = runs_quantised(device, dtype) if keep_quantised is None else keep_quantised
    with contextlib.closing(Checkpoint(path, config, device, dtype, keep_quantised=keep)) as ckpt:
        if config.num_nextn_predict_layers and not mtp:
            config = config.without_mtp()
            ckpt.skip(f"model.layers.{config.num_hidden_layers}.")
        yield ckpt, config
        ckpt.finish()
