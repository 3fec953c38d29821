"""Offline benchmarks of the engine: what the host spends per step, and what a model reaches on this machine.

python -m millrace_bench.engine                      host overhead: schedule + build + commit, runner for free
python -m millrace_bench.engine --model CHECKPOINT   tokens/s and step times (millrace_bench/engine_model.py)
python -m millrace_bench.engine --shard tp8 --device cuda --batches 1 --variants eager graph
python -m millrace_bench.engine --shard tp8 --device cuda --batches 1 16 --context 1024 --drafts 0 1 2 3
python -m millrace_bench.engine --shard tp8 --ranks 2 --sums fused nccl --device cuda --batches 1 --context 1024
"""

from __future__ import annotations

import argparse
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from millrace_common.config import load
from millrace_load.options import SET, CommandLine, checkpoint, number
from millrace_load.record import Record, Row, command, print_record, printed
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

if TYPE_CHECKING:
    import torch
    from millrace_serve.model.parallel import ParallelDims  # host overhead needs no torch

BATCHES = (1, 16, 64, 256)
VARIANTS = {"eager": ("graphs=off",), "graph": ("graphs=on",), "compile": ("graphs=on", "compile_max_batch=16")}
ACCEPTANCE = (0.85, 0.5, 0.25)  # so a step with 1, 2, 3 drafts gives 1.85, 2.35, 2.6 tokens of a sequence


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
    while engine.load().waiting or engine.load().counters["output_tokens"] < batch:
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


def run_model(args: argparse.Namespace, joined: ParallelDims | None = None) -> Iterator[Row]:
    """Rows of each engine, one after the other on the same weights, and how their decode steps compare.

    joined: this process is one of the ranks that sum over the shard's group.
    """
    import torch  # host overhead needs none

    from millrace_bench import engine_compare, engine_model, engine_ranks, shard, v3

    device, mtp = torch.device(args.device), {"num_nextn_predict_layers": int(any(args.drafts))}
    widths = {**(v3.TINY if args.tiny else {}), **mtp}
    source = args.model or shard.build(engine_ranks.shard_of(args.shard, joined), args.layers, device, widths)
    most = args.prefill_tokens + max(args.batches) * (1 + max(args.drafts))
    fused = engine_ranks.fused_of(source, joined, device, most) if joined else None
    decode: list[Row] = []
    for sums, variant, drafts in itertools.product(args.sums, args.variants or [""], args.drafts):
        if joined:
            source.reduce.fused = fused if sums == "fused" else None
        work = engine_model.Work(
            args.batches, args.context or args.prompt, args.outputs, args.temperature, bool(args.context), drafts
        )
        execution = load(Execution, None, [*_acceptance(args, drafts), *args.set, *VARIANTS.get(variant, ())])
        label = {**({"sums": sums} if joined else {}), **({"variant": variant} if variant else {})}
        for row in engine_model.run(work, source, device, execution, args.prefill_tokens):
            row = {**label, "drafts": drafts, **row}
            if row["kind"] == "decode":
                row |= {} if args.model else {"expected": 1 + sum(args.acceptance[:drafts])}
                decode.append(row)
            yield row
        gc.collect()  # the next engine needs its memory
    yield from engine_compare.ratios(decode)
    if len(args.drafts) > 1:
        yield from engine_compare.best(decode)


def _acceptance(args: argparse.Namespace, drafts: int) -> list[str]:
    """Random weights predict nothing, so how many drafts are accepted is drawn."""
    if args.model or not drafts:
        return []
    return ["random_weights=true", f"simulated_acceptance={list(args.acceptance[:drafts])}"]


def parser() -> CommandLine:
    parser = CommandLine("millrace bench engine", "Offline benchmarks of the engine.")
    parser.add_argument("--model", type=checkpoint, help="checkpoint folder; without: host overhead")
    parser.add_argument("--shard", choices=("tp8", "ep8"), help="time a rank of the 671B model (bench shard)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks of the shard's group, a process and device each")
    parser.add_argument("--sums", nargs="+", default=["fused"], choices=("fused", "nccl"), help="library of sums")
    parser.add_argument("--layers", type=int, default=61, help="layers of the shard")
    parser.add_argument("--tiny", action="store_true", help="small widths of the shard, for a CPU")
    parser.add_argument("--variants", nargs="+", default=[], choices=list(VARIANTS), help="variants, one by one")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--set", action="append", **SET, help="setting: graphs, kv_dtype …")
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--steps", type=int, default=300, help="steps for the host overhead")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a prompt")
    parser.add_argument(
        "--context", type=int, help="tokens before the first output, with random KV: no prompt is computed"
    )
    parser.add_argument(
        "--drafts", type=number(int), nargs="+", default=[0], choices=range(4), help="draft tokens, one engine each"
    )
    parser.add_argument(
        "--acceptance", type=number(float, 0, 1), nargs=3, default=ACCEPTANCE, metavar="P",
        help="random weights: probability that 1, 2 and 3 draft tokens are accepted (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--outputs", type=int, default=32, help="output tokens")
    parser.add_argument("--prefill-tokens", type=int, default=1024, help="prompt tokens per step")
    parser.add_argument("--temperature", type=number(float), default=0.0)
    return parser


def report(command: str, args: argparse.Namespace, joined: ParallelDims | None = None) -> None:
    """Measures, and prints unless another rank does. `command` started the bench, perhaps not this process."""
    found = run_model(args, joined) if args.model or args.shard else run(tuple(args.batches), args.steps)
    quiet = joined and joined.rank
    rows = list(found) if quiet else printed(found)
    if not quiet:
        print_record(Record("engine", vars(args), {"rows": rows}, command=command))


def of_rank(dims: ParallelDims, device: torch.device, command: str, args: argparse.Namespace) -> list[Row]:
    """Rank 0 prints."""
    report(command, args, dims)
    return []


def main() -> None:
    args = parser().parse_args()
    if args.ranks > 1:
        from millrace_bench.processes import Ranks

        Ranks(args.ranks, args.device, tensor_parallel=True, timeout_s=120.0).run(of_rank, command(), args)
    else:
        report(command(), args)


if __name__ == "__main__":
    main()
