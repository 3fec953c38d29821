"""An engine with a model, without a server: tokens/s, the time of a decode step, and how much of it the device idles.

    step_ms     median wall time of a steady decode step of the whole loop: schedule, build, launch, read, commit
    accept      tokens that a sequence got in a steady step, counted in the outputs: 1 without drafts
    replay_ms   the same step's graphs alone, replayed back to back; sampling and copies come on top of it
    gap         1 - replay_ms / step_ms: what is not the graph
    exact       whether a replay gives the bits that eager calls give
    idle        part of the time from the end of a step's last copy to the beginning of the next step's model, on the
                device's stream: what it waits for the host, and the copy of the step's arrays
    capture     seconds of all graphs, with Python's garbage collector off as in a worker, and on
    collector   milliseconds of one full collection, with the start's objects frozen as in a worker, and not

The model is a checkpoint's, or random weights in the shapes of a config.json, or one that the caller has. With
`context` sequences come as from a prefill worker, and their KV is random: no prompt is computed.
"""

import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from millrace_load.record import Row
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.core import (
    KvArrived,
    KvOffered,
    Request,
    RequestId,
    Route,
    SamplingParams,
    SequenceOutput,
    Submit,
    TokenOutput,
)
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.start.phases import Phases
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.parallel import ParallelDims

from millrace_bench import shard
from millrace_bench.engine_graphs import captures, collections, replay_is_exact, replay_ms
from millrace_bench.stamps import Stamp, milliseconds, stamp

TOKEN_IDS = (16, 1000)  # that every vocabulary has
EDGE = 2  # steps at either end that are not steady


@dataclass(frozen=True, slots=True)
class Work:
    batches: Sequence[int]
    prompt: int  # tokens
    outputs: int  # tokens, all but the first from decode steps
    temperature: float = 0.0
    context: bool = False  # the prompt's KV is there
    drafts: int = 0  # of every sequence in every step
    overlap: bool = True  # the host prepares a step while the one before runs


def run(
    work: Work, source: Path | DeepseekV3, device: torch.device, execution: Execution, prefill_tokens: int
) -> Iterator[Row]:
    """`source`: a checkpoint's folder, or a model."""
    phases, path = Phases(), source if isinstance(source, Path) else Path()
    length = work.prompt + work.outputs
    limits = Limits(
        num_pages=max(work.batches) * (-(-length // 64) + 1) + 2,
        max_model_len=length,
        max_running=max(work.batches),
        max_prefill_tokens=prefill_tokens,
        prefix_cache=False,
        overlap=work.overlap,
        draft_tokens=work.drafts,
        draft_batches=(max(work.batches),) * work.drafts,
    )
    model = None if isinstance(source, Path) else source
    dtype = model.dtype if model else torch.bfloat16 if device.type == "cuda" else torch.float32
    engine = load_rank(
        limits, Role.DECODE, path, ParallelDims(), device, dtype, execution=execution, phases=phases, model=model
    ).engine()
    yield {"kind": "start", **{f"{name}_s": round(value, 2) for name, value in phases.seconds.items()}}
    if work.context:
        shard.fill(engine.pool.view())
    for batch in work.batches:
        if not work.context:
            yield _prefill(engine, batch, work)
        yield _decode(engine, batch, work)
    if not work.context:
        yield from captures(engine)
        yield collections()
    engine.close()
    gc.unfreeze()  # what the start has frozen would stay in memory


def submit(engine: Engine, batch: int, work: Work, outputs: int, route: Route = Route.LOCAL) -> list[RequestId]:
    rng = random.Random(batch)
    params = SamplingParams(max_tokens=outputs, temperature=work.temperature, ignore_eos=True)
    ids = [RequestId(room, 0) for room in range(batch)]
    for id in ids:
        tokens = [rng.randrange(*TOKEN_IDS) for _ in range(work.prompt)]
        engine.submit(Submit(Request(id=id, token_ids=tokens, sampling=params, route=route)))
    return ids


def import_context(engine: Engine, batch: int, work: Work) -> None:
    """Sequences whose prompt a prefill worker would have computed; what is on their pages stays there."""
    ids = submit(engine, batch, work, work.outputs, Route.IMPORT)
    for id in ids:
        engine.submit(KvOffered(id))
    reserved = 0
    while reserved < batch:
        reserved += len(engine.step().reserved)
    for id in ids:
        engine.submit(KvArrived(id, SequenceOutput(id, 0, [TokenOutput(TOKEN_IDS[0])])))


def _prefill(engine: Engine, batch: int, work: Work) -> Row:
    submit(engine, batch, work, 1)
    started = time.perf_counter()
    while engine.has_work():
        engine.step()
    seconds = time.perf_counter() - started
    tokens = batch * work.prompt
    return {"kind": "prefill", "batch": batch, "prompt": work.prompt, "tokens_per_s": round(tokens / seconds)}


def _decode(engine: Engine, batch: int, work: Work) -> Row:
    if work.context:
        import_context(engine, batch, work)
    else:
        submit(engine, batch, work, work.outputs)
    speaking: set[RequestId] = set()
    while len(speaking) < batch:
        speaking.update(output.id for output in engine.step().outputs)
    watch = Watch(engine._runner)
    times, tokens, clock = [], 0, time.perf_counter()
    while engine.has_work():
        events = engine.step()
        now = time.perf_counter()
        if len(events.outputs) == batch and not any(output.finish for output in events.outputs):
            times.append(now - clock)
            tokens += sum(len(output.tokens) for output in events.outputs)
        clock = now
    step_ms, accept = statistics.median(times) * 1e3, tokens / batch / len(times)
    row = {"kind": "decode", "batch": batch, "prompt": work.prompt, "step_ms": round(step_ms, 3)}
    row |= {"accept": round(accept, 4), "tokens_per_s": round(batch * accept / step_ms * 1e3, 1), **watch.stop()}
    return row | _graph(engine, batch, step_ms)


def _graph(engine: Engine, batch: int, step_ms: float) -> Row:
    row: Row = {}
    alone_ms = replay_ms(engine, batch)
    if alone_ms is not None:
        row |= {"replay_ms": round(alone_ms, 3), "gap": round(1 - alone_ms / step_ms, 4)}
    if engine._runner._graphs is not None:  # type: ignore[attr-defined]
        row["exact"] = replay_is_exact(engine, batch)
    return row


class Watch:
    """When each step's model begins on the device, and when the last copy of its results is over."""

    def __init__(self, runner: Any) -> None:
        self._runner, self._device = runner, runner._device.torch
        self._begin: Stamp = None
        self._steps: list[tuple[Stamp, Stamp]] = []
        run = runner._run

        def begins(call: Callable[..., Any]) -> Callable[..., Any]:
            def begin(*args: Any) -> Any:
                self._begin = stamp(self._device)
                return call(*args)

            return begin

        def end(*args: Any) -> Any:
            read = run(*args)
            self._steps.append((self._begin, stamp(self._device)))
            return read

        runner._forward, runner._replay, runner._run = begins(runner._forward), begins(runner._replay), end

    def stop(self) -> Row:
        """Once all steps are done."""
        del self._runner._forward, self._runner._replay, self._runner._run
        steps = self._steps[EDGE:-EDGE]
        if len(steps) < 2:
            return {}
        gaps = [milliseconds(one[1], other[0]) for one, other in itertools.pairwise(steps)]
        whole = milliseconds(steps[0][0], steps[-1][0])
        return {"idle": round(sum(gaps) / whole, 4), "idle_us": round(statistics.median(gaps) * 1e3, 1)}
