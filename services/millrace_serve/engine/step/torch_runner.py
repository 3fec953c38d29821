"""Runs steps on the model.

    launch       hands the batch to the runner's thread and returns a Future
    that thread  packs the step's arrays, copies them to the device and launches forward, sampling and the copies of the
                 results; it never waits for the device
    reader       another thread: waits until the step is done, and resolves the Future

Sampled tokens stay on the device in `last_tokens`, where the next step finds them, so step N+1 is launched while step
N runs. Steps of decode sequences alone are graphs (engine/step/graphs.py), where there are any; steps with prompt
chunks are launched op by op.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from millrace_serve.engine.cache.canary import mismatches
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.schedule.plan import StepOutput
from millrace_serve.engine.step.batch import StepBatch
from millrace_serve.engine.step.device import Device
from millrace_serve.engine.step.graphs import DecodeGraphs, PaddedRows
from millrace_serve.engine.step.sampling import TokenTables, results, sample
from millrace_serve.engine.step.sampling_batch import SamplingBatch
from millrace_serve.engine.step.staging import NUM_SLOTS, Staging
from millrace_serve.model.inputs import AttnPlan, ForwardInput

A = TypeVar("A")  # numpy array or tensor
T = TypeVar("T")
Read = Callable[[], StepOutput]


class Model(Protocol):
    def forward(self, inputs: ForwardInput, kv: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


@dataclass(slots=True)
class Rows(Generic[A]):
    """A step as it is, without padding. The first `num_decode` tokens are those last sampled on the sampled slots."""

    token_ids: A  # int64 [T]
    positions: A  # int64 [T]
    kv_slots: A  # int64 [T]
    cu_q: A  # int32 [B+1]
    seq_lens: A  # int32 [B]
    page_table: A  # int32 [B, P]
    num_tokens: A  # int32 [1]

    @classmethod
    def of(cls, batch: StepBatch) -> Rows[np.ndarray]:
        cu_q = np.zeros(len(batch.q_lens) + 1, np.int32)
        np.cumsum(batch.q_lens, out=cu_q[1:])
        count = np.array([batch.num_tokens], np.int32)
        rows = batch.token_ids, batch.positions, batch.kv_slots
        return Rows(*rows, cu_q, batch.seq_lens, batch.page_table, count)


@dataclass(slots=True)
class Cargo(Generic[A]):
    """Everything that a step brings to the device."""

    rows: Rows[A] | PaddedRows[A]  # type: ignore[type-var]
    sample_rows: A  # int64 [S]
    sample_slots: A  # int64 [S]
    preset: tuple[A, A] | None
    sampling: SamplingBatch[A] | None  # None: greedy
    canary: tuple[A, A] | None  # pages and their words


class TorchRunner:
    def __init__(self, model: Model, pool: KvPool, config: EngineConfig, vocab_size: int, device: Device) -> None:
        self._model, self._pool, self._kv, self._device = model, pool, pool.view(), device
        self.last_tokens = torch.zeros(config.max_running + 1, dtype=torch.int64, device=device.torch)
        self._tables = TokenTables(vocab_size, device.torch)
        self._graphs: DecodeGraphs | None = None
        tokens = config.max_running + config.max_prefill_tokens
        pages = config.max_running * config.max_pages_per_seq
        self._staging = Staging(device, 32 * tokens + 4 * pages + 64 * config.max_running)
        self._num_steps = 0
        self._in_flight = threading.BoundedSemaphore(NUM_SLOTS)
        self._launcher = ThreadPoolExecutor(1, "runner", device.bind)
        self._reader = ThreadPoolExecutor(1, "reader", device.bind)

    def launch(self, batch: StepBatch) -> Future[StepOutput]:
        future: Future[StepOutput] = Future()
        self._launcher.submit(self._launch, batch, future)
        return future

    def close(self) -> None:
        """Launched steps are finished: other ranks may be in the middle of them."""
        self._launcher.shutdown()
        self._reader.shutdown()

    def call(self, function: Callable[[], T]) -> T:
        """Run something on the thread that launches steps, between two of them."""
        return self._launcher.submit(function).result()

    def use_graphs(self, graphs: DecodeGraphs) -> None:
        """From the next step on."""
        self._graphs = graphs

    def forward(self, inputs: ForwardInput) -> Tensor:
        """-> logits float32 [S, V] of the sampled rows"""
        return self._model.logits(self._model.forward(inputs, self._kv)[inputs.sample_rows])

    def forward_all(self, inputs: ForwardInput) -> Tensor:
        """-> logits float32 [T, V]"""
        return self._model.logits(self._model.forward(inputs, self._kv))

    def _launch(self, batch: StepBatch, future: Future[StepOutput]) -> None:
        self._in_flight.acquire()
        try:
            read = self._run(batch, self._num_steps % NUM_SLOTS)
            self._num_steps += 1
        except BaseException as error:
            self._in_flight.release()
            future.set_exception(error)
        else:
            self._reader.submit(self._read, read, future)

    def _read(self, read: Read, future: Future[StepOutput]) -> None:
        try:
            output = read()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(output)
        finally:
            self._in_flight.release()

    @torch.inference_mode()
    def _run(self, batch: StepBatch, slot: int) -> Read:
        bucket = self._graphs.bucket(batch) if self._graphs else None
        cargo: Cargo[Tensor] = self._staging.upload(slot, self._cargo(batch, bucket))
        if cargo.preset is not None:
            self.last_tokens.index_copy_(0, *cargo.preset)
        answers = {}
        if cargo.canary is not None:
            answers["canaries"] = self._pool.canary_table()[cargo.rows.page_table[: len(batch.q_lens)], :2]
        logits = self._logits(cargo, batch)
        if cargo.canary is not None:
            pages, words = cargo.canary
            self._pool.canary_table()[pages, :2] = words
        if len(batch.sample_rows):
            answers |= self._sample(logits, batch, cargo)
        return _reading(batch, self._staging.download(slot, answers))

    def _cargo(self, batch: StepBatch, bucket: int | None) -> Cargo[np.ndarray]:
        rows = Rows.of(batch) if bucket is None or self._graphs is None else self._graphs.pad(batch, bucket)
        canary = None if batch.canary is None else (batch.canary.write_pages, batch.canary.write_words)
        sampling = None if batch.sampling.is_greedy else batch.sampling
        return Cargo(rows, batch.sample_rows, batch.sample_slots, batch.preset, sampling, canary)

    def _logits(self, cargo: Cargo[Tensor], batch: StepBatch) -> Tensor:
        """float32 [S, V]"""
        if isinstance(cargo.rows, PaddedRows):
            assert self._graphs is not None
            return self._graphs.run(cargo.rows)[: batch.num_tokens]
        return self.forward(self._inputs(cargo.rows, cargo, batch))

    def _inputs(self, rows: Rows[Tensor], cargo: Cargo[Tensor], batch: StepBatch) -> ForwardInput:
        if batch.num_decode:
            slots, decode = cargo.sample_slots[: batch.num_decode], rows.token_ids[: batch.num_decode]
            torch.index_select(self.last_tokens, 0, slots, out=decode)
        attn = AttnPlan(
            num_decode=batch.num_decode,
            cu_q=rows.cu_q,
            seq_lens=rows.seq_lens,
            page_table=rows.page_table,
            q_lens_host=tuple(batch.q_lens.tolist()),
            seq_lens_host=tuple(batch.seq_lens.tolist()),
        )
        return ForwardInput(
            token_ids=rows.token_ids,
            positions=rows.positions,
            kv_slots=rows.kv_slots,
            attn=attn,
            sample_rows=cargo.sample_rows,
            num_tokens=batch.num_tokens,
            dp_num_tokens=batch.dp_num_tokens,
            num_tokens_device=rows.num_tokens,
        )

    def _sample(self, logits: Tensor, batch: StepBatch, cargo: Cargo[Tensor]) -> dict[str, Tensor]:
        if cargo.sampling is None:
            tokens, raw = logits.argmax(dim=-1), None
        else:
            tokens, raw = sample(logits, batch.sampling, cargo.sampling, self._tables)
        self.last_tokens.index_copy_(0, cargo.sample_slots, tokens)
        return results(tokens, raw, batch.sampling.num_logprobs)


def _reading(batch: StepBatch, download: Callable[[], dict[str, Any]]) -> Read:
    """The step's answer, once the device has given it."""

    def read() -> StepOutput:
        answers = download()
        canaries = answers.pop("canaries", None)
        output = StepOutput(**{"tokens": np.zeros(0, np.int64), **answers})
        if canaries is not None:
            assert batch.canary is not None
            output.corrupt = mismatches(batch.canary, batch.page_table, canaries.view(np.uint64))
        return output

    return read
