"""Runs steps on the model.

One thread owns the model, the sampling state and the device's stream; `launch` hands it a batch and returns. Sampled
tokens stay on the device in `_last_tokens`, where the next step finds them, so a step never waits for the host to
read the one before.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from millrace_serve.engine.batch import StepBatch
from millrace_serve.engine.canary import mismatches
from millrace_serve.engine.kv_pool import KvPool
from millrace_serve.engine.plan import StepOutput
from millrace_serve.engine.sampling import TokenTables, sample, to_output
from millrace_serve.model.inputs import AttnPlan, ForwardInput


class Model(Protocol):
    def forward(self, inputs: ForwardInput, kv: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class TorchRunner:
    def __init__(self, model: Model, pool: KvPool, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self._model = model
        self._pool = pool
        self._kv = pool.view()
        self._device = device
        self._last_tokens = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._tables = TokenTables(vocab_size, device)
        self._thread = ThreadPoolExecutor(1, "runner")

    def launch(self, batch: StepBatch) -> Future[StepOutput]:
        return self._thread.submit(self._run, batch)

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)

    @torch.inference_mode()
    def _run(self, batch: StepBatch) -> StepOutput:
        corrupt = self._check(batch)
        inputs = self._inputs(batch)
        hidden = self._model.forward(inputs, self._kv)
        if batch.canary is not None:
            self._pool.write_canaries(batch.canary.write_pages, batch.canary.write_words)
        if not len(batch.sample_rows):
            return StepOutput(np.zeros(0, np.int64), corrupt=corrupt)
        logits = self._model.logits(hidden[inputs.sample_rows])
        tokens, raw = sample(logits, batch.sampling, self._tables)
        self._last_tokens[self._to(batch.sample_slots)] = tokens
        output = to_output(tokens, raw, batch.sampling.num_logprobs)
        output.corrupt = corrupt
        return output

    def _check(self, batch: StepBatch) -> dict[int, str]:
        if batch.canary is None:
            return {}
        return mismatches(batch.canary, batch.page_table, self._pool.read_canaries(batch.page_table))

    def _inputs(self, batch: StepBatch) -> ForwardInput:
        if batch.preset is not None:
            slots, values = batch.preset
            self._last_tokens[self._to(slots)] = self._to(values)
        tokens = self._to(batch.token_ids)
        if batch.num_decode:
            decode = tokens[: batch.num_decode]
            decode.copy_(self._last_tokens[-1 - decode])
        cu_q = np.zeros(len(batch.q_lens) + 1, np.int32)
        np.cumsum(batch.q_lens, out=cu_q[1:])
        attn = AttnPlan(
            num_decode=batch.num_decode,
            cu_q=self._to(cu_q),
            seq_lens=self._to(batch.seq_lens),
            page_table=self._to(batch.page_table),
            q_lens_host=tuple(batch.q_lens.tolist()),
            seq_lens_host=tuple(batch.seq_lens.tolist()),
        )
        return ForwardInput(
            token_ids=tokens,
            positions=self._to(batch.positions),
            kv_slots=self._to(batch.kv_slots),
            attn=attn,
            sample_rows=self._to(batch.sample_rows),
            num_tokens=batch.num_tokens,
            dp_num_tokens=batch.dp_num_tokens,
        )

    def _to(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device, non_blocking=True)
