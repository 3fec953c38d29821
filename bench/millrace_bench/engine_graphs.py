"""What an engine's decode graphs cost and give, and what Python's garbage collector costs beside them."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from millrace_load.record import Row
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.step.device import device_of
from millrace_serve.engine.step.graphs import Key


def replay_ms(engine: Engine, batch: int, repeats: int = 20) -> float | None:
    """Of the graphs that steps of this batch replay, their inputs as the last step left them."""
    runner: Any = engine._runner
    graphs = runner._graphs
    if graphs is None or runner._device.torch.type == "cpu":
        return None
    key = _key(engine, batch)
    replays = [replay for replay in graphs._replays[key] if replay is not None]

    def times() -> float:
        with torch.inference_mode():
            device = device_of(runner._device.torch)
            _take_all(graphs, key, batch)
            capacity = runner.slots.capacity.clone()
            runner.slots.capacity.copy_(runner.slots.lengths)  # nothing is accepted, so the contexts stay as they are
            _call(replays)
            device.synchronize()
            started = time.perf_counter()
            for _ in range(repeats):
                _call(replays)
            device.synchronize()
            taken = time.perf_counter() - started
            runner.slots.capacity.copy_(capacity)
            return taken / repeats * 1e3

    return runner.call(times)


def replay_is_exact(engine: Engine, batch: int) -> bool:
    """Whether the graphs give the bits of the calls that they were captured from, on the last step's inputs."""
    runner: Any = engine._runner
    graphs, state, key = runner._graphs, runner.slots, _key(engine, batch)
    replays = [replay for replay in graphs._replays[key] if replay is not None]
    eager = [graphs._body(key)]
    if len(replays) > 1:
        eager.append(graphs._acceptance(key, graphs._accept))

    def compare() -> bool:
        with torch.inference_mode():
            _take_all(graphs, key, batch)
            # A step back: rows at the end of their pages would all write to the null page, which padding rows read.
            state.lengths[:batch] -= key.num_queries
            before = state.lengths.clone(), state.last_tokens.clone()

            def results(calls: Sequence[Callable[[], None]]) -> tuple[torch.Tensor, ...]:
                state.lengths.copy_(before[0])
                state.last_tokens.copy_(before[1])
                graphs._results["logits"].fill_(torch.nan)
                _call(calls)
                logits = graphs._results["logits"][: batch * key.num_queries]
                return logits.clone(), state.lengths[:batch].clone(), state.last_tokens[:batch].clone()

            return all(map(torch.equal, results(replays), results(eager)))

    return runner.call(compare)


def _key(engine: Engine, batch: int) -> Key:
    graphs = engine._runner._graphs  # type: ignore[attr-defined]
    bucket = next(bucket for bucket in graphs.buckets if batch <= bucket)
    return Key(bucket, engine.config.num_queries(batch))


def _take_all(graphs: Any, key: Key, batch: int) -> None:
    """Sequences end one after the other where drafts are accepted by chance; their slots still hold them."""
    graphs._slots[: key.bucket] = graphs._state.padding
    graphs._slots[:batch] = torch.arange(batch, device=graphs._slots.device)
    graphs._num_rows.fill_(batch * key.num_queries)


def _call(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()


def captures(engine: Engine) -> Iterator[Row]:
    runner: Any = engine._runner
    if runner._graphs is None:
        return
    row: Row = {"kind": "capture", "graphs": len(runner._graphs._replays)}
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
