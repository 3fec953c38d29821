"""Steps with prompt chunks as graphs, with a gap for each layer's attention; the rows of a step are padded to a bucket.

Launched op by op, a step costs the host some 25 launches for each layer, however few tokens it has. Between two
attentions the work of a layer depends on the number of rows alone, so it is captured once for each bucket:

    graph 0   embedding, first norm, q and kv of layer 0
    gap 0     attention of layer 0, launched op by op: its shapes are the step's own
    graph 1   o_proj and MLP of layer 0, q and kv of layer 1
    …
    graph L   o_proj and MLP of the last layer, final norm

`num_rows` keeps padding rows away from the experts and their KV goes to the null page, as in decode graphs
(engine/step/graphs.py); attention leaves them out. All replicas take the bucket of the longest one.
"""

import logging
import time
from collections.abc import Sequence

import torch
from millrace_kernels.backend import SMALL_TOKENS
from torch import Tensor

from millrace_serve.engine.step.device import Device, Gap, ReplayParts
from millrace_serve.engine.step.graphs import WARMUPS, bounded, with_steps, without_collector
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.inputs import AttnPlan, ForwardInput

log = logging.getLogger(__name__)

# Rows. Up to SMALL_TOKENS activations are not quantised, so these have a bucket of their own.
BUCKETS = (SMALL_TOKENS, 32, 64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048)
BUCKET_STEP = 1024  # beyond the last of them


def chunk_buckets_up_to(most: int) -> tuple[int, ...]:
    """The last one is `most`. None for 0."""
    return bounded(with_steps(BUCKETS, BUCKET_STEP, most), most) if most else ()


class ChunkGraphs:
    """The graphs of one rank, used only by the thread that launches steps."""

    def __init__(self, device: Device, model: DeepseekV3, kv: Tensor, buckets: Sequence[int]) -> None:
        """`kv`: as in DeepseekV3.forward"""
        self._device, self._model, self._kv, self.buckets = device, model, kv, tuple(buckets)
        rows, where, heads = self.buckets[-1], device.torch, model.heads
        self._rows = torch.zeros(3, rows, dtype=torch.int64, device=where)  # token ids, positions, KV slots
        self._num_rows = torch.zeros(1, dtype=torch.int32, device=where)
        # Padding rows keep what an earlier step has left there, so they are finite.
        self._heads = torch.zeros(rows, heads.num_heads * heads.v_dim, dtype=model.dtype, device=where)
        self._hidden = torch.zeros(rows, model.config.hidden_size, dtype=model.dtype, device=where)
        self._no_sequence = AttnPlan(
            0, self._num_rows[:0], torch.zeros(0, 1, dtype=torch.int32, device=where), q_lens_host=(), seq_lens_host=()
        )
        self._replays: dict[int, ReplayParts] = {}

    def holds(self, inputs: ForwardInput) -> bool:
        """Whether the step can be a graph, here and on every other replica."""
        return inputs.shared is None and 0 < _longest(inputs) <= self.buckets[-1]

    def forward(self, inputs: ForwardInput) -> Tensor:
        """As DeepseekV3.forward of the same step; all rows are hidden states, valid until the next call."""
        bucket, count = self._bucket(inputs), len(inputs.token_ids)
        step, layers = self._model.attn_step(inputs, self._kv), enumerate(self._model.layers)
        self._rows[:, :count] = torch.stack((inputs.token_ids, inputs.positions, inputs.kv_slots))
        self._rows[:, count:bucket].zero_()
        self._num_rows.fill_(count)

        def attention(q: Tensor, c_kv: Tensor, k_pe: Tensor) -> None:
            index, layer = next(layers)
            own = q[:count], c_kv[:count], k_pe[:count]
            self._heads[:count].copy_(layer.self_attn.attended(*own, step, self._kv[:, index]))

        self._replays[bucket](attention)
        return self._hidden[:count]

    @torch.inference_mode()
    def capture(self) -> None:
        started = time.monotonic()
        with without_collector():
            for bucket in reversed(self.buckets):  # the others find room in its memory
                self._replays[bucket] = self._capture(bucket)
        sizes, seconds = ",".join(map(str, self.buckets)), time.monotonic() - started
        log.info("chunk graphs captured buckets=%s seconds=%.1f", sizes, seconds)

    def _capture(self, bucket: int) -> ReplayParts:
        inputs = self._inputs(bucket)

        def run(gap: Gap) -> None:
            def attend(q: Tensor, c_kv: Tensor, k_pe: Tensor) -> Tensor:
                gap(q, c_kv, k_pe)
                return self._heads[:bucket]

            self._hidden[:bucket].copy_(self._model.forward(inputs, self._kv, attend))

        for _ in range(WARMUPS):
            run(lambda *tensors: None)  # which needs no attention
        self._device.synchronize()
        return self._device.capture_parts(run)

    def _inputs(self, bucket: int) -> ForwardInput:
        token_ids, positions, kv_slots = self._rows[:, :bucket]
        dp = self._model.dims.dp
        return ForwardInput(
            token_ids,
            positions,
            kv_slots,
            self._no_sequence,
            sample_rows=token_ids[:0],
            dp_num_tokens=(bucket,) * dp if dp > 1 else (),
            num_tokens=self._num_rows,
        )

    def _bucket(self, inputs: ForwardInput) -> int:
        return next(bucket for bucket in self.buckets if _longest(inputs) <= bucket)


def _longest(inputs: ForwardInput) -> int:
    """Rows of the longest replica."""
    return max(inputs.dp_num_tokens, default=len(inputs.token_ids))
