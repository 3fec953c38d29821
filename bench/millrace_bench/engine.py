"""Offline benchmarks of the engine: what the host spends per step, and what a model reaches on this machine.

python -m millrace_bench.engine                      host overhead: schedule + build + commit, runner for free
python -m millrace_bench.engine --model CHECKPOINT   tokens/s of prefill and decode
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace_serve.engine.batch import BatchBuilder
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import Request, RequestId, SamplingParams, Submit
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.factory import make_scheduler, sim_layout
from millrace_serve.engine.kv_pool import KvPool
from millrace_serve.engine.limits import ModelFacts
from millrace_serve.engine.sim_runner import SimRunner, SimSettings

from millrace_bench.common import Record, print_record

BATCHES = (1, 16, 64, 256)
Row = dict[str, Any]


def run(batches: tuple[int, ...] = BATCHES, steps: int = 300, model: Path | None = None) -> list[Row]:
    """One row per measurement. `model`: checkpoint directory for the second mode."""
    if model is not None:
        return [row for batch in batches for row in _model_rows(batch, model)]
    rows = [_decode_overhead(batch, steps) for batch in batches]
    return rows + [_prefill_overhead(tokens) for tokens in (2048, 8192)]


def _decode_overhead(batch: int, steps: int) -> Row:
    """Steady decoding, contexts of 1K to 4K tokens, overlap on. Timed per phase; medians in microseconds."""
    rng = random.Random(0)
    engine = _free_engine(batch, max_model_len=8192, num_pages=batch * 120 + 2, max_prefill_tokens=8192)
    lengths = [rng.randrange(1024, 4096) for _ in range(batch)]
    _submit(engine, rng, lengths, max_tokens=3000)
    while engine.load().waiting or engine.load().output_tokens < batch:
        engine.step()
    times = _time_phases(engine, steps)
    return {"kind": "decode", "batch": batch, **times}


def _prefill_overhead(tokens: int) -> Row:
    """Prompts of `tokens` tokens in one chunk each."""
    rng = random.Random(0)
    engine = _free_engine(8, max_model_len=tokens + 8, num_pages=tokens // 64 * 64, max_prefill_tokens=tokens)
    _submit(engine, rng, [tokens] * 24, max_tokens=1)
    return {"kind": "prefill", "batch": 1, "tokens": tokens, **_time_phases(engine, 20)}


def _free_engine(batch: int, **config: int) -> Engine:
    settings = SimSettings()
    config_ = EngineConfig(max_running=batch, max_waiting=64, **config)
    pool = KvPool(sim_layout(config_, settings), config_.num_pages)
    scheduler = make_scheduler(config_, Role.UNIFIED, ModelFacts(settings.vocab_size, frozenset((1,))), time.monotonic)
    return Engine(config_, scheduler, BatchBuilder(config_, oracle=True), SimRunner(settings, pool), pool)


def _submit(engine: Engine, rng: random.Random, lengths: list[int], max_tokens: int, vocab: int = 30000) -> None:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for room, length in enumerate(lengths):
        tokens = [rng.randrange(16, vocab) for _ in range(length)]
        engine.submit(Submit(Request(id=RequestId(room, 0), token_ids=tokens, sampling=params)))


def _time_phases(engine: Engine, steps: int) -> Row:
    """Median microseconds of each phase and of their sum per step."""
    spent: dict[str, list[float]] = {"schedule": [], "build": [], "commit": [], "step": []}
    scheduler, builder, runner = engine._scheduler, engine._builder, engine._runner
    scheduler.schedule = _timed(scheduler.schedule, spent["schedule"])  # type: ignore[method-assign]
    scheduler.commit = _timed(scheduler.commit, spent["commit"])  # type: ignore[method-assign]
    builder.build = _timed(builder.build, spent["build"])  # type: ignore[method-assign]
    simulated: list[float] = []
    runner.launch = _timed(runner.launch, simulated)  # type: ignore[method-assign]
    step = _timed(engine.step, spent["step"])
    for _ in range(steps):
        step()
    whole = [total - sim for total, sim in zip(spent["step"], simulated, strict=True)]
    medians = {f"{name}_us": round(statistics.median(values) * 1e6, 1) for name, values in spent.items()}
    medians["step_us"] = round(statistics.median(whole) * 1e6, 1)
    medians["step_p99_us"] = round(sorted(whole)[int(len(whole) * 0.99)] * 1e6, 1)
    return medians


def _timed(function: Callable[..., Any], into: list[float]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        started = time.perf_counter()
        result = function(*args)
        into.append(time.perf_counter() - started)
        return result

    return call


def _model_rows(batch: int, path: Path, prompt: int = 256, outputs: int = 32) -> list[Row]:
    import torch  # the first mode runs without it
    from millrace_serve.engine.torch_factory import build_engine
    from millrace_serve.model.parallel import ParallelDims

    pages = batch * (-(-(prompt + outputs) // 64) + 1) + 2
    config = EngineConfig(
        num_pages=pages, max_model_len=prompt + outputs, max_running=batch, max_prefill_tokens=1024, prefix_cache=False
    )
    engine = build_engine(config, Role.UNIFIED, path, ParallelDims(), torch.device("cpu"), torch.float32)
    rng = random.Random(0)
    started = time.perf_counter()
    _submit(engine, rng, [prompt] * batch, max_tokens=1, vocab=1000)
    while engine.has_work():
        engine.step()
    prefill_s = time.perf_counter() - started
    _submit(engine, rng, [prompt] * batch, max_tokens=outputs, vocab=1000)
    speaking: set[RequestId] = set()
    while len(speaking) < batch:
        speaking.update(output.id for output in engine.step().outputs)
    started, before = time.perf_counter(), engine.load().output_tokens
    while engine.has_work():
        engine.step()
    decode_s, decoded = time.perf_counter() - started, engine.load().output_tokens - before
    engine.close()
    return [
        {"kind": "prefill", "batch": batch, "prompt": prompt, "tokens_per_s": round(batch * prompt / prefill_s)},
        {"kind": "decode", "batch": batch, "prompt": prompt, "tokens_per_s": round(decoded / decode_s)},
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Offline benchmarks of the engine.")
    parser.add_argument("--model", type=Path, help="checkpoint directory: measure tokens/s instead of host overhead")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    rows = run(tuple(args.batches), args.steps, args.model)
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    print_record(Record("engine", vars(args), {"rows": rows}))


if __name__ == "__main__":
    main()
