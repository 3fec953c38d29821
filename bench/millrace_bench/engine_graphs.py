"""What an engine's decode graphs cost and give, and what Python's garbage collector costs beside them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from typing import Any

import torch
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.step.device import device_of

Row = dict[str, Any]


def replay_ms(engine: Engine, batch: int, repeats: int = 20) -> float | None:
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


def replay_is_exact(engine: Engine, batch: int) -> bool:
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


def captures(engine: Engine) -> Iterator[Row]:
    runner: Any = engine._runner
    if runner._graphs is None:
        return
    row: Row = {"kind": "capture", "graphs": len(runner._graphs.buckets)}
    for name, collector in (("gc_off_s", False), ("gc_on_s", True)):
        started = time.perf_counter()
        runner.call(lambda collector=collector: runner._graphs.capture(collector))
        row[name] = round(time.perf_counter() - started, 2)
    yield row


def collections() -> Row:
    gc.freeze()
    row: Row = {"kind": "collector", "objects": gc.get_freeze_count()}
    for name in ("frozen_ms", "thawed_ms"):
        started = time.perf_counter()
        gc.collect()
        row[name] = round((time.perf_counter() - started) * 1e3, 2)
        gc.unfreeze()
    return row
