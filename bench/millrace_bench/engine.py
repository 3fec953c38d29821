"""Offline benchmarks of the engine: what the host spends per step, and what a model reaches on this machine.

python -m millrace_bench.engine                      host overhead: schedule + build + commit, runner for free
python -m millrace_bench.engine --model CHECKPOINT   tokens/s and step times (millrace_bench/engine_model.py)
python -m millrace_bench.engine --shard tp8 --device cuda --batches 1 --variants eager graph
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace_common.config import load
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import EngineConfig, Execution, Role
from millrace_serve.engine.core import Request, RequestId, SamplingParams, Submit
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.grammar.grammars import Grammars
from millrace_serve.engine.schedule.factory import make_scheduler
from millrace_serve.engine.schedule.limits import ModelFacts
from millrace_serve.engine.sim.factory import sim_layout
from millrace_serve.engine.sim.runner import SimRunner, SimSettings
from millrace_serve.engine.step.batch import BatchBuilder

from millrace_bench.common import Record, print_record

BATCHES = (1, 16, 64, 256)
VARIANTS = {"eager": ("graphs=off",), "graph": ("graphs=on",), "compile": ("graphs=on", "compile=decode")}
Row = dict[str, Any]


def run(batches: tuple[int, ...] = BATCHES, steps: int = 300) -> list[Row]:
    """One row per measurement of the host's time."""
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
    facts, grammars = ModelFacts(settings.vocab_size, frozenset((1,))), Grammars()
    scheduler = make_scheduler(config_, Role.UNIFIED, facts, time.monotonic, grammars)
    runner = SimRunner(settings, pool, config_)
    return Engine(config_, scheduler, grammars, BatchBuilder(config_, runner.join), runner, pool)


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


def run_model(args: argparse.Namespace) -> list[Row]:
    """Rows of each variant, and how its decode steps compare with the first one's."""
    import torch  # host overhead needs none

    from millrace_bench import engine_model, shard, v3

    device = torch.device(args.device)
    source = args.model or shard.build(shard.SHARDS[args.shard], args.layers, device, v3.TINY if args.tiny else None)
    work = engine_model.Work(args.batches, args.prompt, args.outputs, args.temperature)
    rows: list[Row] = []
    for variant in args.variants or [""]:
        execution = load(Execution, None, [*args.set, *VARIANTS.get(variant, ())])
        found = engine_model.run(work, source, device, execution, args.prefill_tokens)
        rows += [{"variant": variant, **row} for row in found] if variant else found
    return rows + ratios([row for row in rows if row["kind"] == "decode"], args.variants)


def ratios(rows: list[Row], variants: list[str]) -> list[Row]:
    """Of the step times of all variants but the first to the first one's, by batch."""
    steps = {(row.get("variant"), row["batch"]): row["step_ms"] for row in rows}
    batches = sorted({batch for _, batch in steps})
    return [
        {"kind": "ratio", "batch": batch, "variant": variant, "to": variants[0],
         "speedup": round(steps[variants[0], batch] / steps[variant, batch], 3)}
        for variant in variants[1:] for batch in batches
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Offline benchmarks of the engine.")
    parser.add_argument("--model", type=Path, help="checkpoint directory: measure a model instead of host overhead")
    parser.add_argument("--shard", choices=("tp8", "ep8"), help="a rank of the 671B model instead (bench shard)")
    parser.add_argument("--layers", type=int, default=61, help="of the shard")
    parser.add_argument("--tiny", action="store_true", help="small widths of the shard, for a CPU")
    parser.add_argument("--variants", nargs="+", default=[], choices=list(VARIANTS), help="one engine after the other")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="graphs, compile, kv_dtype …")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--steps", type=int, default=300, help="of host overhead")
    parser.add_argument("--prompt", type=int, default=256, help="tokens")
    parser.add_argument("--outputs", type=int, default=32, help="tokens")
    parser.add_argument("--prefill-tokens", type=int, default=1024, help="per step")
    parser.add_argument("--temperature", type=float, default=0.0)
    args = parser.parse_args()
    if args.model or args.shard:
        rows = run_model(args)
    else:
        rows = run(tuple(args.batches), args.steps)
    for row in rows:
        print("  ".join(f"{key}={value}" for key, value in row.items()))
    print_record(Record("engine", vars(args), {"rows": rows}))


if __name__ == "__main__":
    main()
