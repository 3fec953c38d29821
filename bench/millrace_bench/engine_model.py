"""An engine with a model, without a server: tokens/s, the time of a decode step, and how much of it the device idles.

    step_ms     median wall time of a steady decode step of the whole loop: schedule, build, launch, read, commit
    replay_ms   the same step's graph alone, replayed back to back; sampling and copies come on top of it
    gap         1 - replay_ms / step_ms: what is not the graph
    exact       whether a replay gives the bits that eager calls give
    idle        part of the time from the end of a step's last copy to the beginning of the next step's model, on the
                device's stream: what it waits for the host, and the copy of the step's arrays
    capture     seconds of all graphs, with Python's garbage collector off as in a worker, and on
    collector   milliseconds of one full collection, with the start's objects frozen as in a worker, and not

The model is a checkpoint's, or random weights in the shapes of a config.json, or one that the caller has.
"""

from __future__ import annotations

import gc
import itertools
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.core import Request, RequestId, SamplingParams, Submit
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.start.phases import Phases
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.engine.step.device import device_of
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.parallel import ParallelDims

from millrace_bench.stamps import Stamp, milliseconds, stamp

TOKEN_IDS = (16, 1000)  # that every vocabulary has
EDGE = 2  # steps at either end that are not steady
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    batches: Sequence[int]
    prompt: int  # tokens
    outputs: int  # tokens, all but the first from decode steps
    temperature: float = 0.0


def run(
    work: Work, source: Path | DeepseekV3, device: torch.device, execution: Execution, prefill_tokens: int
) -> list[Row]:
    """`source`: a checkpoint's folder, or a model."""
    phases, path = Phases(), source if isinstance(source, Path) else Path()
    length = work.prompt + work.outputs
    limits = Limits(
        num_pages=max(work.batches) * (-(-length // 64) + 1) + 2,
        max_model_len=length,
        max_running=max(work.batches),
        max_prefill_tokens=prefill_tokens,
        prefix_cache=False,
    )
    model = None if isinstance(source, Path) else source
    dtype = model.dtype if model else torch.bfloat16 if device.type == "cuda" else torch.float32
    engine = load_rank(
        limits, Role.UNIFIED, path, ParallelDims(), device, dtype, execution=execution, phases=phases, model=model
    ).engine()
    rows: list[Row] = [{"kind": "start", **{f"{name}_s": round(value, 2) for name, value in phases.seconds.items()}}]
    for batch in work.batches:
        rows += [_prefill(engine, batch, work), _decode(engine, batch, work)]
    if engine._runner._graphs is not None:  # type: ignore[attr-defined]
        rows.append(_captures(engine))
    rows.append(_collections())
    engine.close()
    return rows


def _submit(engine: Engine, batch: int, work: Work, outputs: int) -> None:
    rng = random.Random(batch)
    params = SamplingParams(max_tokens=outputs, temperature=work.temperature, ignore_eos=True)
    for room in range(batch):
        tokens = [rng.randrange(*TOKEN_IDS) for _ in range(work.prompt)]
        engine.submit(Submit(Request(id=RequestId(room, 0), token_ids=tokens, sampling=params)))


def _prefill(engine: Engine, batch: int, work: Work) -> Row:
    _submit(engine, batch, work, 1)
    started = time.perf_counter()
    while engine.has_work():
        engine.step()
    seconds = time.perf_counter() - started
    tokens = batch * work.prompt
    return {"kind": "prefill", "batch": batch, "prompt": work.prompt, "tokens_per_s": round(tokens / seconds)}


def _decode(engine: Engine, batch: int, work: Work) -> Row:
    _submit(engine, batch, work, work.outputs)
    speaking: set[RequestId] = set()
    while len(speaking) < batch:
        speaking.update(output.id for output in engine.step().outputs)
    watch = Watch(engine._runner)
    times, clock = [], time.perf_counter()
    while engine.has_work():
        events = engine.step()
        now = time.perf_counter()
        if len(events.outputs) == batch and not any(output.finish for output in events.outputs):
            times.append(now - clock)
        clock = now
    step_ms = statistics.median(times) * 1e3
    row = {"kind": "decode", "batch": batch, "prompt": work.prompt, "step_ms": round(step_ms, 3)}
    row |= {"tokens_per_s": round(batch / step_ms * 1e3), **watch.stop()}
    replay_ms = _replay_ms(engine, batch)
    if replay_ms is not None:
        row |= {"replay_ms": round(replay_ms, 3), "gap": round(1 - replay_ms / step_ms, 4)}
    if engine._runner._graphs is not None:  # type: ignore[attr-defined]
        row["exact"] = _replay_is_exact(engine, batch)
    return row


class Watch:
    """When each step's model begins on the device, and when the last copy of its results is over."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._device = runner, runner._device.torch
        self._begin: Stamp = None
        self._steps: list[tuple[Stamp, Stamp]] = []
        logits, run = runner._logits, runner._run

        def begin(*args: Any) -> Any:
            self._begin = stamp(self._device)
            return logits(*args)

        def end(*args: Any) -> Any:
            read = run(*args)
            self._steps.append((self._begin, stamp(self._device)))
            return read

        runner._logits, runner._run = begin, end

    def stop(self) -> Row:
        """Once all steps are done."""
        del self._runner._logits, self._runner._run
        steps = self._steps[EDGE:-EDGE]
        if len(steps) < 2:
            return {}
        gaps = [milliseconds(one[1], other[0]) for one, other in itertools.pairwise(steps)]
        whole = milliseconds(steps[0][0], steps[-1][0])
        return {"idle": round(sum(gaps) / whole, 4), "idle_us": round(statistics.median(gaps) * 1e3, 1)}


def _replay_ms(engine: Engine, batch: int, repeats: int = 20) -> float | None:
    """Of the graph that steps of this batch replay, its inputs as the last step left them."""
    runner: Any = engine._runner
    graphs = runner._graphs
    if graphs is None or runner._device.torch.type == "cpu":
        return None
    bucket = next(bucket for bucket in graphs.buckets if batch <= bucket)

    def replays() -> float:
        with torch.inference_mode():
            device = device_of(runner._device.torch)
            graphs._replays[bucket, 1]()
            device.synchronize()
            started = time.perf_counter()
            for _ in range(repeats):
                graphs._replays[bucket, 1]()
            device.synchronize()
            return (time.perf_counter() - started) / repeats * 1e3

    return runner.call(replays)


def _replay_is_exact(engine: Engine, batch: int) -> bool:
    """Whether the graph gives the bits of the calls that it was captured from, on the last step's inputs."""
    runner: Any = engine._runner
    graphs = runner._graphs
    bucket = next(bucket for bucket in graphs.buckets if batch <= bucket)

    def compare() -> bool:
        with torch.inference_mode():
            # One token back: rows at the end of their pages would all write to the sink, which padding rows read.
            slots = graphs._slots[:bucket]
            runner.slots.lengths[slots[slots != runner.slots.padding]] -= 1
            graphs._replays[bucket, 1]()
            replayed = graphs._logits[:bucket].clone()
            graphs._logits.fill_(torch.nan)
            graphs._body(bucket, 1)()
            return torch.equal(replayed, graphs._logits[:bucket])

    return runner.call(compare)


def _captures(engine: Engine) -> Row:
    runner: Any = engine._runner
    row: Row = {"kind": "capture", "graphs": len(runner._graphs.buckets)}
    for name, collector in (("gc_off_s", False), ("gc_on_s", True)):
        started = time.perf_counter()
        runner.call(lambda collector=collector: runner._graphs.capture(collector))
        row[name] = round(time.perf_counter() - started, 2)
    return row


def _collections() -> Row:
    gc.freeze()
    row: Row = {"kind": "collector", "objects": gc.get_freeze_count()}
    for name in ("frozen_ms", "thawed_ms"):
        started = time.perf_counter()
        gc.collect()
        row[name] = round((time.perf_counter() - started) * 1e3, 2)
        gc.unfreeze()
    return row
