"""Replicas of the 671B model that step together, each on a GPU of its own, without a server: the engine's own path.

Each replica schedules, agrees with the others, exchanges rows, samples and drafts as in a worker; decode steps are CUDA
graphs. Weights are random.

    decode         every replica has BATCH sequences with CONTEXT tokens of random KV: no prompt is computed
    prefill        every replica gets PROMPTS prompts of LENGTH tokens at one moment, and computes them in one step
    mixed          as decode, and every step computes CHUNK tokens of a prompt besides
    ms             decode: median wall time of the last --steps steps in which all replicas decode all their sequences;
                   prefill: median time to the last first token. Of the slowest replica
    accept         tokens that a sequence got in such a step: 1 without drafts
    tokens_per_s   of all replicas together
    imbalance      with redundant experts: choices on the busiest rank over the mean, before and after experts move
    memory         GiB of a rank's device, as estimated before the weights were there and as measured then

python -m millrace_bench.replicas --dp 8 --widths v3 --exchange peer gather --decode 256x2048 --prefill 4x4096
python -m millrace_bench.replicas --dp 8 --widths v3 --decode 128x4096 --drafts 1 --skew "power law" --spare 0 1
python -m millrace_bench.replicas --dp 2 --widths tiny --layers 2 --device cpu --decode 2x100 --prefill 2x70   a dry run
"""

import argparse
import faulthandler
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from millrace_common.config import load
from millrace_load.options import SET, CommandLine, form, number
from millrace_load.record import Record, Row, print_record, printed
from millrace_serve.engine.config import GIB, Execution, Limits, Role
from millrace_serve.engine.core import Request, RequestId, SamplingParams, Submit
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.start.memory import MemoryPlan
from millrace_serve.engine.start.torch_factory import Rank, load_rank
from millrace_serve.engine.step.batch import HostBatch
from millrace_serve.engine.step.runner import StepHandle
from millrace_serve.model.eplb import moving
from millrace_serve.model.parallel import ParallelDims

from millrace_bench import v3
from millrace_bench.balance import SKEWS, skew
from millrace_bench.engine import ACCEPTANCE
from millrace_bench.engine_model import TOKEN_IDS, Work, import_context, submit
from millrace_bench.processes import Ranks
from millrace_bench.shard import fill, say

INTERVAL = 64  # steps between two placements of experts: a worker takes 256
ROUNDS = 3  # of these until experts are where the counts want them, and have been counted there
IDLE_POLL_S = 0.001
WAITING = 3  # prompts in a mixed run: one is computed, others are there when it ends
START_S = 900.0  # a rank that compiles keeps the others waiting


@dataclass(frozen=True, slots=True)
class Engines:
    """What the engines of one run have in common. One set of processes."""

    exchange: str
    drafts: int
    spare: int

    def limits(self, args: argparse.Namespace) -> Limits:
        decode = [*args.decode, *((count + WAITING, length) for count, length, _ in args.mixed)]
        sizes = [(count, length + outputs(self, args)) for count, length in decode]
        sizes += [(count, length + 1) for count, length in args.prefill]
        running, rows = max(count for count, _ in sizes), [count * length for count, length in args.prefill]
        rows += [chunk for _, _, chunk in args.mixed]
        return Limits(
            num_pages=max(count * (-(-length // 64) + 1) for count, length in sizes) + 2,
            max_model_len=max(length for _, length in sizes),
            max_running=running,
            max_prefill_tokens=max(rows, default=16),
            prefix_cache=False,
            draft_tokens=self.drafts,
            draft_batches=(running,) * self.drafts,
        )

    def execution(self, args: argparse.Namespace) -> Execution:
        own = ["random_weights=true", f"exchange={self.exchange}", f"redundant_experts={self.spare}"]
        if buckets := sorted({count for count, *_ in (*args.decode, *args.mixed)}):
            own.append(f"graphs={buckets}")
        if self.drafts:
            own.append(f"simulated_acceptance={list(args.acceptance[: self.drafts])}")
        return load(Execution, None, [*own, *args.set])


def outputs(engines: Engines, args: argparse.Namespace) -> int:
    """Tokens of each sequence: enough for every step that is counted, and for those before."""
    return (settling(engines, args) + args.steps + 4) * (1 + engines.drafts)


def settling(engines: Engines, args: argparse.Namespace) -> int:
    """Steps until experts have moved and were counted again."""
    return ROUNDS * INTERVAL + moving.PLAN_STEPS + args.layers if engines.spare else 0


class Replica:
    """One of them, with what it needs to meet the others: all of them go on stepping while one has work."""

    def __init__(
        self, rank: Rank, engines: Engines, folder: Path, dims: ParallelDims, args: argparse.Namespace
    ) -> None:
        self.engine, self._model, self._rank = rank.engine(), rank.runner._model, rank
        self._engines, self._folder, self._dims, self._args = engines, folder, dims, args
        self._full_of = _watch(self.engine, dims.dp)

    def measure(self) -> list[Row]:
        rows, args = [memory_row(self._rank.memory)], self._args
        fill(self.engine.pool.view())
        for name in args.skew:
            skew(self._model, name)
            rows += self._sized("decode", args.decode, name) + self._sized("prefill", args.prefill, name)
            for count, length, chunk in args.mixed:
                self.meet(f"mixed {count}x{length}+{chunk}, {name}")
                row = {"kind": "mixed", "count": count, "length": length, "chunk": chunk, "skew": name}
                rows.append({**row, **self.mixed(count, length, chunk)})
        if args.eager_prompts:
            self.meet("end of graphs")
            self._rank.runner.use_graphs(None, None)
            rows += [
                {**row, "skew": name, "graphs": False} for row in self._sized("prefill", args.prefill, f"{name}, eager")
            ]
        self.meet("end")
        self.engine.stop()
        while not self.engine.stopped:
            self.engine.step()
        self.engine.close()
        return rows

    def _sized(self, kind: str, sizes: Sequence[tuple[int, int]], name: str) -> list[Row]:
        rows = []
        for count, length in sizes:
            what = f"{kind} {count}x{length}, {name}"
            say(f"replica {self._dims.dp_rank}: {what}")
            self.meet(what)
            row = getattr(self, kind)(count, length, what)
            rows.append({"kind": kind, "count": count, "length": length, "skew": name, **row})
        return rows

    def meet(self, name: str) -> None:
        """Returns when every replica has come; meanwhile this one steps with those that work."""
        files = [self._folder / f"{name}-{replica}".replace(" ", "-") for replica in range(self._dims.dp)]
        files[self._dims.dp_rank].touch()
        while not all(file.exists() for file in files):
            if self.engine.wait_s() != 0:
                time.sleep(IDLE_POLL_S)
            self.engine.step()

    def decode(self, count: int, length: int, what: str) -> Row:
        engine = self.engine
        import_context(engine, count, Work((count,), length, outputs(self._engines, self._args)))
        times, tokens, imbalances = [], [], [engine.load().expert_imbalance]
        clock, before = time.perf_counter(), False
        while engine.has_work():
            events = engine.step()
            now, full = time.perf_counter(), self._full_of(count)
            if before and full:
                times.append(now - clock)
                tokens.append(sum(len(output.tokens) for output in events.outputs))
            clock, before = now, full
            assert events.load is not None
            if events.load.expert_imbalance != imbalances[-1]:
                imbalances.append(events.load.expert_imbalance)
        if len(times) < self._args.steps:
            raise RuntimeError(f"{what}: {len(times)} steps of all replicas, not {self._args.steps}")
        counted = slice(-self._args.steps, None)
        accept = statistics.mean(tokens[counted]) / count
        row: Row = {"ms": round(statistics.median(times[counted]) * 1e3, 3), "accept": round(accept, 4)}
        if len(imbalances) > 1:
            row["imbalance"] = [round(statistics.mean(one), 3) for one in (imbalances[1], imbalances[-1])]
        return row

    def prefill(self, count: int, length: int, what: str) -> Row:
        """The first one, whose kernels may be new, is not counted."""
        times = []
        for turn in range(1 + self._args.repeats):
            self.meet(f"{what}, {turn}")
            started = time.perf_counter()
            submit(self.engine, count, Work((count,), length, 1), 1)
            while self.engine.has_work():
                self.engine.step()
            times.append(time.perf_counter() - started)
        return {"ms": round(statistics.median(times[1:]) * 1e3, 3), "accept": 1.0}

    def mixed(self, count: int, length: int, chunk: int) -> Row:
        """Chunks of prompts of `length` tokens beside `count` sequences: those of all places in a prompt."""
        engine, scheduler = self.engine, self.engine._scheduler
        whole, scheduler.config = scheduler.config, scheduler.config.model_copy(update={"max_prefill_tokens": chunk})
        import_context(engine, count, Work((count,), length, outputs(self._engines, self._args)))
        times: list[float] = []
        number, clock, before = itertools.count(count), time.perf_counter(), False
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        while engine.has_work():
            if engine.load().waiting < WAITING - 1 and len(times) < self._args.steps:
                prompt = random.Random(next(number)).choices(range(*TOKEN_IDS), k=length)
                engine.submit(Submit(Request(id=RequestId(next(number), 0), token_ids=prompt, sampling=params)))
            engine.step()
            now, full = time.perf_counter(), self._full_of(count, chunk)
            if before and full:
                times.append(now - clock)
            clock, before = now, full
        scheduler.config = whole
        return {"ms": round(statistics.median(times) * 1e3, 3), "steps": len(times), "accept": 1.0}


def memory_row(plans: Sequence[MemoryPlan]) -> Row:
    """`plans`: estimated and measured; empty on a CPU."""
    uses = [{use: round(size / GIB, 3) for use, size in plan.demand._asdict().items()} for plan in plans]
    return {"kind": "memory", **dict(zip(("estimated", "measured"), uses, strict=False))}


def _watch(engine: Engine, dp: int) -> Callable[..., bool]:
    """Tells whether in the step launched since its last call every replica decoded so many sequences, and computed so
    many prompt tokens.
    """
    launch, last = engine._runner.launch, None

    def watched(batch: HostBatch) -> StepHandle:
        nonlocal last
        last = batch
        return launch(batch)

    def full_of(count: int, chunk: int = 0) -> bool:
        nonlocal last
        batch, last = last, None
        if batch is None or chunk:
            return batch is not None and (batch.num_decode, sum(batch.chunk_lens)) == (count, chunk)
        return batch.all_decode and (batch.dp_num_sampled or (batch.num_decode,)) == (count,) * dp

    engine._runner.launch = watched  # type: ignore[method-assign]
    return full_of


def measured(
    dims: ParallelDims, device: torch.device, engines: Engines, folder: str, args: argparse.Namespace
) -> list[Row]:
    """`folder`: has the model, and is where the replicas meet."""
    faulthandler.dump_traceback_later(args.limit_s, exit=True)
    moving.INTERVAL = INTERVAL
    if args.device == "cpu":
        moving.LEAST_CHOICES = 1
    dtype = torch.float32 if args.device == "cpu" else torch.bfloat16
    say(f"replica {dims.rank}: starts with {engines}")
    limits, execution = engines.limits(args), engines.execution(args)
    loaded = load_rank(limits, Role.DECODE, Path(folder) / "model", dims, device, dtype, execution)
    return Replica(loaded, engines, Path(folder), dims, args).measure()


def run(engines: Engines, args: argparse.Namespace) -> list[Row]:
    """One set of processes."""
    with tempfile.TemporaryDirectory(prefix="millrace-replicas-") as folder:
        v3.write_folder(Path(folder) / "model", args.widths, args.layers)
        of_ranks = Ranks(args.dp, args.device, timeout_s=START_S).run(measured, engines, folder, args)
    return [merged(list(rows), engines) for rows in zip(*of_ranks, strict=True)]


def merged(rows: list[Row], engines: Engines) -> Row:
    """Of one size: the replicas wait for the slowest one. The first one's memory is that of all."""
    how = {"replicas": len(rows), "exchange": engines.exchange, "drafts": engines.drafts, "spare": engines.spare}
    if rows[0]["kind"] == "memory":
        return {**rows[0], **how}
    row = max(rows, key=lambda one: one["ms"])
    accept = statistics.mean(one["accept"] for one in rows)
    tokens = row["count"] * (row["length"] if row["kind"] == "prefill" else accept) + row.get("chunk", 0)
    rate = {"accept": round(accept, 4), "tokens_per_s": round(len(rows) * tokens / row["ms"] * 1e3)}
    return {**row, **rate, **how}


def parser() -> CommandLine:
    parser = CommandLine("millrace bench replicas", "Replicas of the 671B model that step together.")
    parser.add_argument("--dp", type=int, default=2, help="replicas, each with a GPU")
    parser.add_argument("--widths", choices=list(v3.WIDTHS), default="v3")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--exchange", nargs="+", default=["gather"], choices=("gather", "peer", "deepep"))
    parser.add_argument("--drafts", type=number(int), nargs="+", default=[0], choices=range(4))
    parser.add_argument("--spare", type=number(int), nargs="+", default=[0], help="slots of a rank for moved experts")
    parser.add_argument("--skew", nargs="+", default=["even"], choices=list(SKEWS), help="skew of the gates")
    parser.add_argument("--decode", nargs="*", default=[], **form("BATCHxCONTEXT"), help="per replica")
    parser.add_argument("--prefill", nargs="*", default=[], **form("PROMPTSxLENGTH"), help="per replica")
    parser.add_argument("--mixed", nargs="*", default=[], **form("BATCHxCONTEXT+CHUNK"))
    parser.add_argument("--eager-prompts", action="store_true", help="the prompts again, launched op by op")
    parser.add_argument("--steps", type=int, default=50, help="counted decode steps")
    parser.add_argument("--repeats", type=int, default=3, help="repeats of prefill")
    parser.add_argument(
        "--acceptance", type=number(float, 0, 1), nargs=3, default=ACCEPTANCE, metavar="P",
        help="probability that 1, 2 and 3 draft tokens are accepted (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--set", action="append", **SET, help="setting: kv_dtype, graphs …")
    parser.add_argument(
        "--limit-s", type=float, default=1200.0, help="seconds of one set of engines, else ranks print stacks"
    )
    return parser


def main() -> None:
    made = parser()
    args = made.parse_args()
    if not (args.decode or args.prefill or args.mixed):
        made.error("--decode, --prefill or --mixed: nothing to measure")
    engines = itertools.product(args.exchange, args.drafts, args.spare)
    rows = printed(row for each in engines for row in run(Engines(*each), args))
    memory, timed = ([row for row in rows if (row["kind"] == "memory") is wanted] for wanted in (True, False))
    print_record(Record("replicas", vars(args), {"rows": timed, "memory": memory}))


if __name__ == "__main__":
    main()
