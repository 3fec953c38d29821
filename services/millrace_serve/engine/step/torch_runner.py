"""Runs steps on the model.

    launch       hands the batch to the runner's thread and returns a Future of the reader's
    that thread  packs the step's arrays, copies them to the device and launches forward, sampling and the copies of the
                 results; it never waits for the device
    reader       another thread: waits until the step is launched and done, and gives its results

Sampled tokens, drafts and lengths stay on the device (engine/step/slots.py), where the next step finds them, so step
N+1 is launched while step N runs. Where there are graphs, steps of decode sequences alone are such (graphs.py), and
short steps with prompt chunks are but for their attention (chunk_graphs.py); others are launched op by op.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from millrace_common.reasons import Reason
from torch import Tensor

from millrace_serve.engine.cache.canary import mismatches
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.context_parallel.turns import with_shared
from millrace_serve.engine.core import Failure
from millrace_serve.engine.drafts.speculate import Drafter
from millrace_serve.engine.schedule.plan import StepOutput
from millrace_serve.engine.step.batch import HostBatch, StepBatch
from millrace_serve.engine.step.chunk_graphs import ChunkGraphs
from millrace_serve.engine.step.device import Device
from millrace_serve.engine.step.graphs import DecodeGraphs
from millrace_serve.engine.step.page_sums import PageSums
from millrace_serve.engine.step.runner import Announce
from millrace_serve.engine.step.sampling import TokenTables, results, sample
from millrace_serve.engine.step.slots import Accepted, Slots, accepted_rows, by_sequence
from millrace_serve.engine.step.staging import NUM_SLOTS, Staging
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.eplb.moving import Balancer
from millrace_serve.model.inputs import ForwardInput

T = TypeVar("T")
PEAKS = "peaks"  # the largest logit of each row, [R] and then [S, q]; a NaN or infinite if the logits are
Read = Callable[[], StepOutput]
Accept = Callable[[Tensor], Accepted]  # int64 [R], the sampled tokens


class TorchRunner:
    def __init__(
        self,
        model: DeepseekV3,
        pool: KvPool,
        config: EngineConfig,
        vocab_size: int,
        device: Device,
        simulated: Sequence[float] = (),
        announce: Announce = contextlib.nullcontext,
    ) -> None:
        """`simulated`: Execution.simulated_acceptance; `announce`: what takes long."""
        self._model, self._pool, self._kv, self._device = model, pool, pool.view(), device
        self._announce = announce
        self._sums = PageSums(pool) if pool.layout.summed else None
        self.slots = Slots(config, device.torch)
        self.accept = Drafter(model, self._kv, self.slots, simulated).accept if config.draft_tokens else None
        self._tables = TokenTables(vocab_size, device.torch)
        self._graphs: DecodeGraphs | None = None
        self._chunk_graphs: ChunkGraphs | None = None
        self._balancer: Balancer | None = None
        self._errors: dict[str, Tensor] = {}
        pages = config.max_running * config.max_pages_per_seq
        self._staging = Staging(device, 8 * config.max_prefill_tokens + 20 * pages + 256 * config.max_running)
        self._num_steps = 0
        self._met: set[tuple[int, ...]] = set()  # sizes of steps
        self._in_flight = threading.BoundedSemaphore(NUM_SLOTS)
        self._launcher = ThreadPoolExecutor(1, "runner", device.bind)
        self._reader = ThreadPoolExecutor(1, "reader", device.bind)

    def watch(self, what: str, error: Tensor) -> None:
        """`error`: int32 [1]. A step behind which it is not 0 fails: 1 + the rank that did not answer in time."""
        self._errors[what] = error

    def launch(self, batch: HostBatch) -> Future[StepOutput]:
        return self._reader.submit(self._read, self._launcher.submit(self._launch, batch))

    def counts(self) -> dict[str, object]:
        return {} if self._balancer is None else self._balancer.report._asdict()

    def close(self) -> None:
        """Launched steps are finished: other ranks may be in the middle of them."""
        self._launcher.shutdown()
        self._reader.shutdown()
        self.use_graphs(None, None)  # the end of an NCCL group waits for all graphs that hold a collective of it

    def call(self, function: Callable[[], T]) -> T:
        """Run something on the thread that launches steps, between two of them."""
        return self._launcher.submit(function).result()

    def chunk_graphs(self, device: Device, buckets: Sequence[int]) -> ChunkGraphs | None:
        """To capture; None where there are no buckets, or the experts cannot be captured."""
        if not buckets or not self._model.captures_chunks:
            return None
        return ChunkGraphs(device, self._model, self._kv, buckets)

    def use_graphs(self, graphs: DecodeGraphs | None, chunk_graphs: ChunkGraphs | None) -> None:
        """Use these graphs from the next step on."""
        self._graphs, self._chunk_graphs = graphs, chunk_graphs

    def balance(self) -> None:
        """Balance the load of experts from the next step on, where the model has slots for that."""
        self._balancer = self._model.balancer
        if self._balancer is not None:
            self._balancer.begin()

    def forward(self, inputs: ForwardInput) -> tuple[Tensor, Tensor]:
        """-> hidden states [T, D], logits float32 [T, V]"""
        hidden = self._model.forward(inputs, self._kv)
        return hidden, self._model.logits(hidden)

    def _launch(self, batch: HostBatch) -> Read:
        self._in_flight.acquire()
        with self._compiling(batch):
            read = self._run(batch, self._num_steps % NUM_SLOTS)
        self._num_steps += 1
        return read

    def _compiling(self, batch: HostBatch) -> contextlib.AbstractContextManager[object]:
        """On a GPU, libraries compile kernels for seconds when they first meet a number of rows, by multiples of 64;
        some hold the interpreter meanwhile, so it is announced before.
        """
        rows = batch.num_tokens, sum(batch.dp_num_tokens)
        size = (batch.is_decode, batch.sampling is None, *(-(-count // 64) for count in rows))
        if size in self._met or self._device.torch.type != "cuda":
            return contextlib.nullcontext()
        self._met.add(size)
        return self._announce("the first step of its size")

    def _read(self, launched: Future[Read]) -> StepOutput:
        try:
            return launched.result()()
        finally:
            self._in_flight.release()

    @torch.inference_mode()
    def _run(self, batch: HostBatch, staging_slot: int) -> Read:
        if self._balancer is not None:
            with self._announce("the move of experts") if self._balancer.moving else contextlib.nullcontext():
                self._balancer.before_step()
        graphs = self._graphs if self._graphs is not None and self._graphs.holds(batch) else None
        step = self._staging.upload(staging_slot, batch if graphs is None else graphs.pad(batch), StepBatch[Tensor])
        if step.updates is not None:
            self.slots.update(step.updates)
        answers = {}
        if step.canary is not None:
            answers["canaries"] = self._pool.canary_table()[step.canary.pages]
        logits, positions, accept = self._replay(step, graphs) if graphs is not None else self._forward(step)
        if step.canary is not None:
            self._pool.canary_table()[step.canary.write_pages] = step.canary.write_words
        sampled = self._sample(logits, positions, batch, step)
        accepted = accept(sampled["tokens"])
        if self._sums is not None and step.summed is not None:  # behind the KV of drafts
            self._sums.write(step.summed)
        if step.sampling is not None and step.sampling.penalties is not None:
            self._tables.add(sampled["tokens"], accepted_rows(step, accepted), step.sampling.penalties)
        if step.num_sampled:
            answers |= {name: by_sequence(column, step) for name, column in sampled.items()}
            answers |= {"counts": accepted.counts, "drafted": accepted.drafted}
            answers["drafts"] = self.slots.last_tokens[step.sample_slots, 1:]
        return _reading(batch, self._errors, self._staging.download(staging_slot, answers | self._errors))

    def _forward(self, step: StepBatch[Tensor]) -> tuple[Tensor, Tensor, Accept]:
        """Logits float32 [R, V] of the sampled rows, their positions, and what takes their samples."""
        inputs = self.slots.inputs(step)
        if step.shared is not None:
            inputs = with_shared(inputs, step, self.slots, self._model.dims)
        graphs = self._chunk_graphs
        if graphs is not None and graphs.holds(inputs):
            hidden = graphs.forward(inputs)
        else:
            hidden = self._model.forward(inputs, self._kv)
        accept = partial(self.slots.accept, step) if self.accept is None else partial(self.accept, step, inputs, hidden)
        return self._model.logits(hidden[inputs.sample_rows]), inputs.positions[inputs.sample_rows], accept

    def _replay(self, step: StepBatch[Tensor], graphs: DecodeGraphs) -> tuple[Tensor, Tensor, Accept]:
        return *graphs.run(step), partial(graphs.accept, step)

    def _sample(
        self, logits: Tensor, positions: Tensor, batch: HostBatch, step: StepBatch[Tensor]
    ) -> dict[str, Tensor]:
        """`positions`: of the sampled rows."""
        if batch.sampling is None or step.sampling is None:
            peaks, tokens = logits.max(dim=-1)  # -inf alone does no harm
            return {PEAKS: peaks, **results(tokens, None, -1)}
        peaks = logits.amax(dim=-1)  # before `sample` writes to them
        output_index = self.slots.output_index(positions, step)
        before = None if step.sampling.penalties is None else self.slots.tokens_before(step)
        tokens, raw = sample(logits, batch.sampling, step.sampling, output_index, before, self._tables)
        return {PEAKS: peaks, **results(tokens, raw, batch.sampling.num_logprobs)}


def _reading(batch: HostBatch, errors: Iterable[str], download: Callable[[], dict[str, np.ndarray]]) -> Read:
    """The step's answer, once the device has given it."""

    def read() -> StepOutput:
        answers: dict[str, Any] = download()  # Any: a field of StepOutput is no array
        for what in errors:
            if error := int(answers.pop(what)[0]):
                raise RuntimeError(f"rank {error - 1} did not answer in {what}")
        canaries, peaks = answers.pop("canaries", None), answers.pop(PEAKS, None)
        output = StepOutput(**answers) if answers else StepOutput.nothing()
        if peaks is not None and not np.isfinite(peaks).all():
            taken = np.arange(peaks.shape[1]) < output.counts[:, None]
            output.corrupt = _not_finite(batch, ~np.isfinite(peaks) & taken)
        if canaries is not None:
            assert batch.canary is not None
            output.corrupt |= mismatches(batch.canary, canaries.view(np.uint64))
        return output

    return read


def _not_finite(batch: HostBatch, broken: np.ndarray) -> dict[int, Failure]:
    """By the index of the sequence in the plan. broken: bool [S, q]"""
    failure = Failure(Reason.NOT_FINITE, "the model's logits have a NaN or an infinite number")
    rows = np.flatnonzero(broken.any(axis=1)).tolist()
    first = batch.num_decode
    return dict.fromkeys([row if row < first else first + batch.sampling_chunks[row - first] for row in rows], failure)
