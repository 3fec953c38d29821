"""Flexible workers against every static split, in simulation (fleet.py): each load alone, and loads that change.

python -m millrace_bench.duties                                     loads at --part of what the best split can serve
python -m millrace_bench.duties --systems 40p+24d,64u,64flex        other splits of a fleet
python -m millrace_bench.duties --compare                           the simulator against four H200s that were measured

The times of a step are those of bench/results/GPU/mixed-steps.json (`fit`). All systems get the same requests at the
same moments, all chunks of prompts leave streams their TPOT limit, and all requests are placed by predicted times.
goodput: requests that are due within a load's time and meet the limits, each second.
"""

import argparse
import functools
import itertools
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace

import numpy as np
from millrace_common.split import Capacity, Slo, Workload, best
from millrace_common.step_times import StepTimes, prompt_pairs
from millrace_load.options import CommandLine, number, reader
from millrace_load.record import ROOT, Record, Row, Summary, print_record, print_row
from millrace_load.workload import poisson_arrivals
from millrace_router.config import Policy
from millrace_serve.plan.facts import steps

from millrace_bench.data import read_data
from millrace_bench.fleet import Fleet, Fleets, Job, Request
from millrace_bench.fleet_duties import Duties
from millrace_bench.fleet_worker import Machine
from millrace_bench.pd import LOADS, workers
from millrace_bench.pd_load import Load, Segment, changing

THINK_S, DRAIN_S = 1.0, 60.0
CHANGING = "changing"
LIMIT = Slo(1.0, 0.04)
FIGURES = ("goodput", "ttft_p50", "ttft_p99", "tpot_p50", "tpot_p99")
PARTS = ("fixed_s", "sequence_s", "key_s", "chunk_s", "token_s", "pair_s")
MEASURED = {tuple(run): tuple(figures) for run, figures in read_data("h200-splits.yaml")}  # a system, its rate, a seed


def fit(rows: Sequence[Row], known: StepTimes = StepTimes()) -> StepTimes:
    """The times of rows of `millrace_bench.replicas`, by least squares of the relative error; no part below 0. What the
    rows cannot tell is `known`.
    """
    table = np.array([_amounts(row) for row in rows], float)
    seconds = np.array([row["ms"] for row in rows]) / 1e3
    given = np.array([getattr(known, part) for part in PARTS])
    left, kept = seconds - table @ given, np.flatnonzero((given == 0) & table.any(axis=0))
    scale = table.max(axis=0)
    while True:  # one part that would be negative goes after the other
        found = np.linalg.lstsq(table[:, kept] / scale[kept] / seconds[:, None], left / seconds, rcond=None)[0]
        if found.min() >= 0:
            break
        kept = np.delete(kept, found.argmin())
    given[kept] = found / scale[kept]
    return StepTimes(*given.tolist())


def _amounts(row: Row) -> tuple[float, ...]:
    """Of a step: 1, sequences, keys, 1 with a prompt's chunk, its tokens, its pairs."""
    count, length = row["count"], row["length"]
    if row["kind"] == "prefill":
        return 1, 0, 0, 1, count * length, count * length * length / 2
    chunk = row.get("chunk", 0)  # of all places in a prompt
    return 1, count, count * length, chunk > 0, chunk, prompt_pairs(0, length, chunk) * chunk / length


def result(name: str) -> list[Row]:
    rows: list[Row] = json.loads((ROOT / f"bench/results/{name}.json").read_text())["results"]["rows"]
    return rows


def machine(times: StepTimes, limit: Slo) -> Machine:
    return Machine(
        times, pool=400_000, tpot_s=limit.tpot_s, handover_s=0.01, page_bytes=64 * 576 * 61, read_bytes_per_s=20e9
    )


def fleet(system: str, made: Machine, limit: Slo, outputs: int) -> Fleet:
    counts = workers(system)
    seen = (outputs,) * 64
    return Fleet(Fleets(counts, dict.fromkeys(counts, made), 60.0, Policy.KV_AWARE, slo=limit, seen=seen))


def send(fleet: Fleet, segment: Segment, number: int) -> None:
    """The requests of a load, in its time."""
    for index, at in enumerate(poisson_arrivals(segment.rate / segment.load.turns, segment.seed)):
        if at >= segment.seconds:
            return
        turns = _Turns(fleet, segment.load, number, index)
        fleet.after(segment.begin_s + at, turns.begin)


class _Turns:
    """A conversation, or a request alone."""

    def __init__(self, fleet: Fleet, load: Load, number: int, index: int) -> None:
        self._fleet, self._load, self._number = fleet, load, number
        self._session = f"{number}/{index}" if load.turns > 1 else ""
        self._left, self._tokens = load.turns, 0

    def begin(self) -> None:
        load = self._load
        self._left, prompt = self._left - 1, self._tokens + load.input_len
        self._tokens = prompt + load.output_len
        then = self._think if self._left else None
        request = Request(prompt, load.output_len, load.output_len, str(self._number), self._session, then)
        self._fleet.submit(request)

    def _think(self, job: Job) -> None:
        self._fleet.after(THINK_S, self.begin)


def simulate(system: str, segments: Sequence[Segment], made: Machine, limit: Slo, lead_s: float = 0.0) -> Row:
    """Of all segments; those of the first `lead_s` seconds do not count."""
    began = time.perf_counter()
    run = fleet(system, made, limit, segments[0].load.output_len)
    duties = Duties(run) if "flex" in system else None
    for index, segment in enumerate(segments):
        send(run, segment, index)
    end = segments[-1].begin_s + segments[-1].seconds
    run.run(end + DRAIN_S)
    parts = [row(run.jobs, one.begin_s, one.begin_s + one.seconds, limit) for one in segments]
    name, rate = (segments[0].load.name, segments[0].rate) if len(segments) == 1 else (CHANGING, len(run.jobs) / end)
    return {
        "system": system,
        "load": name,
        "rate": rate,
        **row(run.jobs, lead_s, end, limit),
        "parts": [part["goodput"] for part in parts],
        "changes": [] if duties is None else duties.changes,
        "took_s": time.perf_counter() - began,
    }


def row(jobs: Sequence[Job], begin: float, end: float, limit: Slo) -> Row:
    due = [job for job in jobs if begin <= job.arrival < end]
    done = [job for job in due if job.answered]
    good = [job for job in done if job.ttft <= limit.ttft_s and job.tpot <= limit.tpot_s]
    return {
        "requests": len(due),
        "completed": len(done),
        "goodput": len(good) / (end - begin),
        "ttft": asdict(Summary.of([job.ttft for job in done])),
        "tpot": asdict(Summary.of([job.tpot for job in done])),
    }


def workload(load: Load, rate: float) -> Workload:
    """Of a mean turn."""
    before = (load.turns - 1) / 2 * (load.input_len + load.output_len)
    return Workload(before + load.input_len, load.output_len, rate, before)


def most(load: Load, replicas: int, times: StepTimes, capacity: Capacity, limit: Slo) -> float:
    """Requests per second of which the best split is expected to serve 95 % within the limits."""
    low, high = 0.0, 1000.0 * replicas
    for _ in range(24):
        rate = (low + high) / 2
        found = best(replicas, workload(load, rate), limit, times, capacity)[0][1].goodput
        low, high = (rate, high) if found >= 0.95 * rate else (low, rate)
    return low


def compare() -> list[Row]:
    """Predicted and measured, with prompts in whole chunks and requests without limits: as they ran then."""
    made = replace(machine(h200_times(), Slo()), chunk=2048)
    rows = []
    for (system, rate, seed), measured in MEASURED.items():
        columns = zip(FIGURES, _figures(system, made, rate, seed), measured, strict=True)
        figures = {name: {"predicted": own, "measured": one, "error": own / one - 1} for name, own, one in columns}
        rows.append(print_row(system=system, rate=rate, **figures))
    return rows


def _figures(system: str, made: Machine, rate: float, seed: int) -> tuple[float, ...]:
    """Of 15 s of arrivals, until the last answer."""
    run = fleet(system, made, Slo(), 256)
    for at in itertools.islice(poisson_arrivals(rate, seed), round(15 * rate)):
        run.after(at, functools.partial(run.submit, Request(4096, 256, 256)))
    run.run(200.0)
    ttft, tpot = (Summary.of([getattr(job, name) for job in run.jobs]) for name in ("ttft", "tpot"))
    good = sum(job.ttft <= LIMIT.ttft_s and job.tpot <= LIMIT.tpot_s for job in run.jobs)
    return good / max(job.ended_at for job in run.jobs), ttft.p50, ttft.p99, tpot.p50, tpot.p99


def h200_times() -> StepTimes:
    """61 layers on an H200: its steps of decode and of prompts, and the launches of a chunk as on an H100."""
    launches = fit(result("h100/mixed-steps")).chunk_s * 61 / 30
    alike = [step for step in steps() if (step.gpu, step.shape, step.ranks) == ("H200", "ep8", 1) and step.rows >= 4]
    rows = [{"kind": step.kind, "count": step.rows, "length": step.context, "ms": step.ms} for step in alike]
    return fit(rows, StepTimes(chunk_s=launches))


def grid(args: argparse.Namespace) -> list[Row]:
    times = fit(result(args.steps))
    made = machine(times, LIMIT)
    capacity = Capacity(made.max_running, made.pool, made.chunk, made.handover_s)
    rows = []
    for systems in (group.split(",") for group in args.systems):
        replicas = sum(workers(systems[0]).values())
        rates = [args.part * most(load, replicas, times, capacity, LIMIT) for load in args.loads]
        loads = [replace(load, rates=(round(rate, 2),)) for load, rate in zip(args.loads, rates, strict=True)]
        runs = [[Segment(load, load.rates[0], args.lead + args.seconds, args.seed)] for load in loads if args.seconds]
        runs.append(changing(loads, args.every, args.rounds, args.seed + 1))
        for segments, system in itertools.product(runs, systems):
            lead_s = args.lead if len(segments) == 1 else 0.0
            rows.append(print_row(workers=replicas, **simulate(system, segments, made, LIMIT, lead_s)))
    return rows


def main() -> None:
    parser = CommandLine("python -m millrace_bench.duties", __doc__)
    parser.add_argument("--systems", nargs="+", default=["3p+5d,4p+4d,5p+3d,6p+2d,8u,8flex"], help="for each fleet")
    parser.add_argument("--loads", type=reader(Load.parse), nargs="+", default=[Load.parse(text) for text in LOADS])
    parser.add_argument("--part", type=float, default=0.9, help="share of what the best split can serve (%(default)s)")
    parser.add_argument("--seconds", type=number(float), default=30.0, help="of a load alone; 0: none (%(default)s)")
    parser.add_argument("--lead", type=number(float), default=20.0, help="uncounted, before a load (%(default)s)")
    parser.add_argument("--every", type=float, default=30.0, help="seconds until the load changes (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all loads (%(default)s)")
    parser.add_argument("--steps", default="h100/mixed-steps", help="run with the step times (%(default)s)")
    parser.add_argument("--seed", type=number(int), default=0)
    parser.add_argument("--compare", action="store_true", help="compare predicted and measured instead")
    args = parser.parse_args()
    rows = compare() if args.compare else grid(args)
    print_record(Record("duties-compare" if args.compare else "duties", vars(args), {"rows": rows}))


if __name__ == "__main__":
    main()
