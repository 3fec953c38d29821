"""Steps with an optimisation and without it: graphs of prompt chunks, the overlap of host and device, scratch memory,
uploads, chunks of prompts, cached prefixes, and the attention of a layer for drafts.
"""

import contextlib
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from millrace_kernels.testing.tolerances import rms_error
from millrace_serve.engine.config import Execution
from millrace_serve.engine.step.chunk_graphs import ChunkGraphs
from millrace_serve.engine.step.device import device_of
from millrace_serve.engine.step.staging import NUM_SLOTS, Staging
from millrace_serve.model.attn_step import FORMS, FormThresholds
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.inputs import ForwardInput
from torch import Tensor

from millrace_bench import engine_model, shard, v3
from millrace_bench.kernels.forms import Layer
from millrace_bench.pools import PAGE
from millrace_bench.stamps import synchronize

Arrays = dict[str, np.ndarray[Any, Any]]
Found = tuple[str, float, float, float]  # shape, us of a step with, without, how far the results are apart
CHUNKS = ((16, 0), (128, 0), (512, 0), (512, 2048), (1024, 0), (1600, 0))  # new tokens, cached ones before them
TURNS = 3  # of both, alternating; the median counts


def chunk_graphs(device: torch.device, tiny: bool, layers: int) -> Iterator[Found]:
    """X1: a step with a prompt chunk is a graph with a gap for each attention; without, it is launched op by op."""
    model = _rank(device, tiny, layers)
    for new, cached in ((20, 40),) if tiny else CHUNKS:
        inputs = shard.prefill_step(model, 1, new, device, cached)
        pool = shard.make_pool(model, shard.pages_of([new + cached]) + 1, device, model.dtype)
        calls = _with_gaps(model, inputs, pool), functools.partial(shard.logits, model, inputs, pool)
        yield _compared(f"{new} tokens behind {cached}, {len(model.layers)} layers", calls, 2 if tiny else 10, device)


def _with_gaps(model: DeepseekV3, inputs: ForwardInput, pool: Tensor) -> Callable[[], Tensor]:
    """A step with prompt chunks as graphs between its attentions."""
    graphs = ChunkGraphs(device_of(inputs.device), model, pool, (len(inputs.token_ids),))
    graphs.capture()
    return lambda: model.logits(graphs.forward(inputs)[inputs.sample_rows])


def prompt_chunks(device: torch.device, tiny: bool, layers: int) -> Iterator[Found]:
    """X7: the longest step of decoding streams while a prompt comes, which is its last chunk's; without chunks, the
    step of the whole prompt. Both are graphs with gaps, as in an engine. Results are the streams' logits.
    """
    model = _rank(device, tiny, layers)
    streams, context, prompt, chunk = (2, 40, 60, 20) if tiny else (64, 4096, 8192, 512)
    lens = [context] * streams + [prompt]
    pool = shard.make_pool(model, shard.pages_of(lens) + 1, device, model.dtype)
    on, off = (shard.mixed_step(model, [1] * streams + [new], lens, streams, device) for new in (chunk, prompt))
    off.token_ids[:streams] = on.token_ids[:streams]
    calls = (_with_gaps(model, inputs, pool) for inputs in (on, off))
    what = f"{streams} streams, chunks of {chunk} of {prompt}, {len(model.layers)} layers"
    yield _compared(what, calls, 2 if tiny else 5, device, slice(streams))


def cached_prefix(device: torch.device, tiny: bool, layers: int) -> Iterator[Found]:
    """X8: a prompt whose first pages the prefix tree has; without it, all tokens are computed. Both are graphs."""
    model = _rank(device, tiny, layers)
    length, cached = (84, 64) if tiny else (4096, 3968)
    pool = shard.make_pool(model, shard.pages_of([length]) + 1, device, model.dtype)
    off = shard.prefill_step(model, 1, length, device)
    on = shard.prefill_step(model, 1, length - cached, device, cached)
    calls = (_with_gaps(model, inputs, pool) for inputs in (replace(on, token_ids=off.token_ids[cached:]), off))
    what = f"{length} tokens, {cached} of them cached, {len(model.layers)} layers"
    yield _compared(what, calls, 2 if tiny else 5, device)


def draft_form(device: torch.device, tiny: bool, layers: int) -> Iterator[Found]:
    """A13: attention of a layer for steps that verify drafts, absorbed; without, prefixes are expanded, in pieces as
    large as kernels address. Both are launched op by op. `layers` changes nothing.
    """
    heads, keys = (2, 64) if tiny else (128, 4096)
    expanded = FormThresholds(0, (1 << 22) // heads)
    for sequences, drafts in itertools.product((2,) if tiny else (16, 64), (1, 3)):
        widths = {**v3.V3, **(v3.TINY if tiny else {})}
        layer = Layer(heads, sequences * (keys + PAGE), device, widths)
        calls = (layer.call(keys, 1 + drafts, form, sequences) for form in (FORMS["absorbed"], expanded))
        yield _compared(f"{sequences} x {keys}, {drafts} drafts, {heads} heads", calls, 2 if tiny else 10, device)


def overlap(device: torch.device, tiny: bool, layers: int) -> Iterator[Found]:
    """X3: the host prepares step N+1 while step N runs; without, afterwards. Whole engine, CUDA graphs."""
    model = _rank(device, tiny, layers)
    for batch in (2,) if tiny else (1, 16, 128):
        execution = Execution(graphs=(batch,))
        steps: dict[bool, list[float]] = {True: [], False: []}
        for overlapped in (True, False) * (1 if tiny else TURNS):
            work = engine_model.Work(
                (batch,), 40 if tiny else 1024, 12 if tiny else 100, context=True, overlap=overlapped
            )
            rows = engine_model.run(work, model, device, execution, 16)
            steps[overlapped] += [row["step_ms"] for row in rows if row["kind"] == "decode"]
            gc.collect()  # the next engine needs its memory
        on, off = (1e3 * statistics.median(steps[overlapped]) for overlapped in (True, False))
        # tests/engine/schedule/test_schedulers.py compares the tokens
        yield f"batch {batch}, {len(model.layers)} layers", on, off, 0.0


def scratch(device: torch.device, tiny: bool, layers: int) -> Iterator[Found]:
    """X4: counters come from a block that a step zeroes once; without, each kernel has its own fill."""
    model = _rank(device, tiny, layers)
    for batch in (2,) if tiny else (1, 16, 128):
        inputs = shard.decode_step(model, batch, 100 if tiny else 1024, device)
        pool = shard.make_pool(model, batch * (2 if tiny else 16) + 1, device, model.dtype)
        on, off = _replays(model, functools.partial(shard.logits, model, inputs, pool), device)
        on_us, off_us = _in_turns(on[0], off[0], 2 if tiny else 20, device)
        yield f"batch {batch}, {len(model.layers)} layers", on_us, off_us, rms_error(on[1], off[1])


def _compared(
    shape: str, calls: Iterable[Callable[[], Tensor]], repeats: int, device: torch.device, rows: slice = slice(None)
) -> Found:
    """rows: of the results that should be the same. Without the optimisation comes first, and stores what is cached."""
    on, off = calls
    with torch.inference_mode():
        expected = off()[rows].clone()
        error = rms_error(on()[rows], expected)
    return shape, *_in_turns(on, off, repeats, device), error


def _in_turns(
    on: Callable[[], object], off: Callable[[], object], repeats: int, device: torch.device
) -> tuple[float, float]:
    """Microseconds of each."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(TURNS):
        for step, into in zip((on, off), times, strict=True):
            into.append(statistics.median(shard.time_ms(step, repeats, device)))
    on_ms, off_ms = map(statistics.median, times)
    return 1e3 * on_ms, 1e3 * off_ms


def _replays(
    model: DeepseekV3, step: Callable[[], Tensor], device: torch.device
) -> list[tuple[Callable[[], object], Tensor]]:
    """With the model's scratch memory and without, each with its logits."""
    found: list[tuple[Callable[[], object], Tensor]] = []
    for scratch_of_step in (model.scratch.step, contextlib.nullcontext):
        model.scratch.step = scratch_of_step  # type: ignore[method-assign, assignment]
        try:
            found.append((shard.capture(step, device), step().clone()))
        finally:
            del model.scratch.step
    return found


def upload(device: torch.device, tiny: bool, layers: int) -> Iterator[Found]:
    """A11: the arrays of a step reach the device in one copy that nobody waits for; without, each is copied from where
    it lies, for which the host waits until the work before it is done. `layers` changes nothing.
    """
    for batch in (4,) if tiny else (16, 128):
        arrays = _arrays(batch)
        on, off = _Staged(arrays, device), functools.partial(_copies, arrays, device)
        one, other = on(0), off(0)
        error = max(float((one[name] - other[name]).abs().max()) for name in arrays)
        work = _work(device, tiny)
        on_us, off_us = (_each_us(send, work, device, 10 if tiny else 200) for send in (on, off))
        yield f"batch {batch}, {len(arrays)} arrays", on_us, off_us, error


class _Staged:
    """As the engine does it."""

    def __init__(self, arrays: Arrays, device: torch.device) -> None:
        self._arrays, self._device = arrays, device_of(device)
        self._staging = Staging(self._device, 1 << 16)
        self._waits = [self._device.record()] * NUM_SLOTS

    def __call__(self, step: int) -> dict[str, Tensor]:
        slot = step % NUM_SLOTS
        self._waits[slot]()
        found = self._staging.upload(slot, self._arrays, dict[str, Tensor])
        self._waits[slot] = self._device.record()
        return found


def _copies(arrays: Arrays, device: torch.device, step: int) -> dict[str, Tensor]:
    return {name: torch.from_numpy(array).to(device) for name, array in arrays.items()}


def _arrays(batch: int) -> Arrays:
    """Of a step with that many sequences of up to 128 pages."""
    rng = np.random.default_rng(0)
    sizes = {**dict.fromkeys(("tokens", "positions", "kv_slots", "seq_lens"), (batch,)), "pages": (batch, 128)}
    return {name: rng.integers(0, 1000, shape, dtype=np.int32) for name, shape in sizes.items()}


def _work(device: torch.device, tiny: bool) -> Callable[[], object]:
    """What a step keeps the device busy with, about half a millisecond of it on an H200."""
    x = torch.randn(64 if tiny else 4096, 64 if tiny else 4096, device=device, dtype=torch.bfloat16)
    return lambda: [torch.mm(x, x) for _ in range(2)]


def _each_us(send: Callable[[int], object], work: Callable[[], object], device: torch.device, steps: int) -> float:
    """Microseconds of a step: the host sends its arrays and launches its work, as often as it can."""
    for step in range(NUM_SLOTS):
        send(step)
        work()
    synchronize(device)
    started = time.perf_counter()
    for step in range(steps):
        send(step)
        work()
    synchronize(device)
    return (time.perf_counter() - started) / steps * 1e6


def _rank(device: torch.device, tiny: bool, layers: int) -> DeepseekV3:
    return shard.build(shard.SHARDS["tp8"], 2 if tiny else layers, device, v3.TINY if tiny else None)


STEPS: dict[str, Callable[[torch.device, bool, int], Iterator[Found]]] = {
    "X1": chunk_graphs,
    "X3": overlap,
    "X4": scratch,
    "X7": prompt_chunks,
    "X8": cached_prefix,
    "A11": upload,
    "A13": draft_form,
}
