"""An engine with a model, without a server: tokens/s, the time of a decode step, and how much of it the device idles.

    step_ms     median wall time of a steady decode step of the whole loop: schedule, build, launch, read, commit
    replay_ms   the same step's graph alone, replayed back to back; sampling and copies come on top of it
    gap         1 - replay_ms / step_ms: what is not the graph, an upper bound of the device's idle time
    capture_s   all graphs, with Python's garbage collector off as in a worker, and on

The model is a checkpoint's, or random weights in the shapes of a config.json, or a shard of millrace_bench.shard.
"""

from __future__ import annotations

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
from millrace_serve.engine.device import device_of
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.phases import Phases
from millrace_serve.engine.torch_factory import build_engine
from millrace_serve.model.parallel import ParallelDims

TOKEN_IDS = (16, 1000)  # that every vocabulary has
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Work:
    batches: Sequence[int]
    prompt: int  # tokens
    outputs: int  # tokens, all but the first from decode steps
    temperature: float = 0.0


def run(
    work: Work, path: Path | None, device: str, execution: Execution, prefill_tokens: int, shard: tuple[str, int] | None
) -> list[Row]:
    """`shard`: its name and its layers, in the place of `path`."""
    where = torch.device(device)
    if where.type == "cuda":
        where = torch.device("cuda", torch.cuda.current_device())
    phases, model = Phases(), None
    if shard is not None:
        from millrace_bench.shard import SHARDS, build

        model = build(SHARDS[shard[0]], shard[1], where)
    length = work.prompt + work.outputs
    limits = Limits(
        num_pages=max(work.batches) * (-(-length // 64) + 1) + 2,
        max_model_len=length,
        max_running=max(work.batches),
        max_prefill_tokens=prefill_tokens,
        prefix_cache=False,
    )
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    engine = build_engine(
        limits, Role.UNIFIED, path or Path(), ParallelDims(), where, dtype,
        execution=execution, phases=phases, model=model,
    )  # fmt: skip
    rows: list[Row] = [{"kind": "start", **{f"{name}_s": round(value, 2) for name, value in phases.seconds.items()}}]
    for batch in work.batches:
        rows += [_prefill(engine, batch, work), _decode(engine, batch, work)]
    if engine._runner._graphs is not None:  # type: ignore[attr-defined]
        rows.append(_captures(engine))
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
    times, clock = [], time.perf_counter()
    while engine.has_work():
        events = engine.step()
        now = time.perf_counter()
        if len(events.outputs) == batch and not any(output.finish for output in events.outputs):
            times.append(now - clock)
        clock = now
    step_ms = statistics.median(times) * 1e3
    row = {"kind": "decode", "batch": batch, "prompt": work.prompt, "step_ms": round(step_ms, 3)}
    row["tokens_per_s"] = round(batch / step_ms * 1e3)
    replay_ms = _replay_ms(engine, batch)
    if replay_ms is not None:
        row |= {"replay_ms": round(replay_ms, 3), "gap": round(1 - replay_ms / step_ms, 4)}
    return row


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
            graphs._replays[bucket]()
            device.synchronize()
            started = time.perf_counter()
            for _ in range(repeats):
                graphs._replays[bucket]()
            device.synchronize()
            return (time.perf_counter() - started) / repeats * 1e3

    return runner.call(replays)


def _captures(engine: Engine) -> Row:
    runner: Any = engine._runner
    row: Row = {"kind": "capture", "graphs": len(runner._graphs.buckets)}
    for name, collector in (("gc_off_s", False), ("gc_on_s", True)):
        started = time.perf_counter()
        runner.call(lambda collector=collector: runner._graphs.capture(collector))
        row[name] = round(time.perf_counter() - started, 2)
    return row
