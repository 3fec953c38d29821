"""Runs steps on the model.

    launch       hands the batch to the runner's thread and returns a Future of the reader's
    that thread  packs the step's arrays, copies them to the device and launches forward, sampling and the copies of the
                 results; it never waits for the device
    reader       another thread: waits until the step is launched and done, and gives its results

Sampled tokens and lengths stay on the device (engine/step/slots.py), where the next step finds them, so step N+1 is
launched while step N runs. Steps of decode sequences alone are graphs (engine/step/graphs.py), where there are any;
steps with prompt chunks are launched op by op.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from millrace_serve.engine.cache.canary import mismatches
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.schedule.plan import StepOutput
from millrace_serve.engine.step.batch import HostBatch, StepBatch
from millrace_serve.engine.step.device import Device
from millrace_serve.engine.step.graphs import DecodeGraphs
from millrace_serve.engine.step.sampling import TokenTables, results, sample
from millrace_serve.engine.step.slots import Slots
from millrace_serve.engine.step.staging import NUM_SLOTS, Staging
from millrace_serve.model.inputs import ForwardInput

T = TypeVar("T")
Read = Callable[[], StepOutput]


class Model(Protocol):
    def forward(self, inputs: ForwardInput, kv: Tensor) -> Tensor:
        """-> hidden states [T, D]"""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden [S, D] -> float32 [S, V]"""
        ...


class TorchRunner:
    def __init__(self, model: Model, pool: KvPool, config: EngineConfig, vocab_size: int, device: Device) -> None:
        self._model, self._pool, self._kv, self._device = model, pool, pool.view(), device
        self.slots = Slots(config, device.torch)
        self._tables = TokenTables(vocab_size, device.torch)
        self._graphs: DecodeGraphs | None = None
        pages = config.max_running * config.max_pages_per_seq
        self._staging = Staging(device, 8 * config.max_prefill_tokens + 20 * pages + 256 * config.max_running)
        self._num_steps = 0
        self._in_flight = threading.BoundedSemaphore(NUM_SLOTS)
        self._launcher = ThreadPoolExecutor(1, "runner", device.bind)
        self._reader = ThreadPoolExecutor(1, "reader", device.bind)

    def launch(self, batch: HostBatch) -> Future[StepOutput]:
        return self._reader.submit(self._read, self._launcher.submit(self._launch, batch))

    def close(self) -> None:
        """Launched steps are finished: other ranks may be in the middle of them."""
        self._launcher.shutdown()
        self._reader.shutdown()

    def call(self, function: Callable[[], T]) -> T:
        """Run something on the thread that launches steps, between two of them."""
        return self._launcher.submit(function).result()

    def use_graphs(self, graphs: DecodeGraphs) -> None:
        """Use these graphs from the next step on."""
        self._graphs = graphs

    def forward(self, inputs: ForwardInput) -> Tensor:
        """-> logits float32 [T, V]"""
        return self._model.logits(self._model.forward(inputs, self._kv))

    def _launch(self, batch: HostBatch) -> Read:
        self._in_flight.acquire()
        read = self._run(batch, self._num_steps % NUM_SLOTS)
        self._num_steps += 1
        return read

    def _read(self, launched: Future[Read]) -> StepOutput:
        try:
            return launched.result()()
        finally:
            self._in_flight.release()

    @torch.inference_mode()
    def _run(self, batch: HostBatch, staging_slot: int) -> Read:
        graphs = self._graphs if self._graphs is not None and self._graphs.holds(batch) else None
        step: StepBatch[Tensor] = self._staging.upload(staging_slot, batch if graphs is None else graphs.pad(batch))
        if step.updates is not None:
            self.slots.update(step.updates)
        answers = {}
        if step.canary is not None:
            answers["canaries"] = self._pool.canary_table()[step.canary.pages, :2]
        logits, positions = self._logits(step, graphs)
        if step.canary is not None:
            self._pool.canary_table()[step.canary.write_pages, :2] = step.canary.write_words
        if step.sample_slots.shape[0]:
            answers |= self._sample(logits, positions, batch, step)
        self.slots.advance(step, answers.get("tokens"))
        return _reading(batch, self._staging.download(staging_slot, answers))

    def _logits(self, step: StepBatch[Tensor], graphs: DecodeGraphs | None) -> tuple[Tensor, Tensor]:
        """Logits float32 [S, V] of the sampled rows, and their positions."""
        if graphs is not None:
            return graphs.run(step)
        inputs = self.slots.inputs(step)
        sampled = self._model.forward(inputs, self._kv)[inputs.sample_rows]
        return self._model.logits(sampled), inputs.positions[inputs.sample_rows]

    def _sample(
        self, logits: Tensor, positions: Tensor, batch: HostBatch, step: StepBatch[Tensor]
    ) -> dict[str, Tensor]:
        """`positions`: of the sampled rows."""
        if batch.sampling is None or step.sampling is None:
            return results(logits.argmax(dim=-1), None, -1)
        output_index = self.slots.output_index(positions, step)
        tokens, raw = sample(logits, batch.sampling, step.sampling, output_index, self._tables)
        return results(tokens, raw, batch.sampling.num_logprobs)


def _reading(batch: HostBatch, download: Callable[[], dict[str, Any]]) -> Read:
    """The step's answer, once the device has given it."""

    def read() -> StepOutput:
        answers = download()
        canaries = answers.pop("canaries", None)
        columns = {name: column[:, None] for name, column in answers.items()}  # one row of each sequence
        tokens = columns.pop("tokens", np.zeros((0, 1), np.int64))
        output = StepOutput(tokens, np.ones(len(tokens), np.int32), **columns)
        if canaries is not None:
            assert batch.canary is not None
            output.corrupt = mismatches(batch.canary, canaries.view(np.uint64))
        return output

    return read
