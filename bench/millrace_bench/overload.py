"""Admission under overload: a unified engine that keeps room for expected outputs, against one that does not.

The engine and its scheduler are real. Time is not: a simulated clock advances by the timing model of each step, so a
run depends on its seed only. Outputs end at log-normal lengths that the scheduler cannot know, and the pool is tight.

    capacity      requests per second when all are there at once; the better of both
    preemptions   running sequences that lost their pages, for each 1,000 requests that ended
    recomputed    prompt and output tokens that were computed again, for each token that clients got
    goodput       requests per second that met the limits of TTFT and TPOT; `steady`: and had no gap over a second
    longest_gap   99th percentile of the requests, seconds
    refused       requests that came while the queue was full

With `--workers`, a whole fleet instead (fleet.py): the router's queue, policy, flow and health over simulated workers,
a quarter of which compute prompts. `refused`: requests that no worker took; `failed`: others without an answer.

python -m millrace_bench.overload                         at 1.5 times the capacity
python -m millrace_bench.overload --load 1.0 --pages 300
python -m millrace_bench.overload --workers 4 40 400
"""

from __future__ import annotations

import argparse
import itertools
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
from millrace_common.step_times import StepTimes
from millrace_load.record import Record, Summary, print_record
from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import Failure, Request, RequestId, SamplingParams, SequenceOutput, Submit
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.grammar.grammars import Grammars
from millrace_serve.engine.schedule.expected import LEAST
from millrace_serve.engine.schedule.factory import make_scheduler
from millrace_serve.engine.schedule.limits import ModelFacts
from millrace_serve.engine.schedule.plan import StepOutput
from millrace_serve.engine.schedule.sequence import Sequence
from millrace_serve.engine.sim.factory import sim_layout
from millrace_serve.engine.sim.runner import SimRunner, SimSettings
from millrace_serve.engine.step.batch import BatchBuilder, HostBatch

from millrace_bench.fleet import Fleet, Fleets
from millrace_bench.fleet import Request as FleetRequest
from millrace_bench.fleet_worker import Machine

# A step of 16 ms, and a prompt's token as long as on an H200 that computes 16,000 of them in a second.
SETTINGS = SimSettings(vocab_size=32768, step_s=16e-3, token_s=60e-6, sequence_s=40e-6, page_kv_bytes=64)
MOST_OUTPUTS = 4096
LONG_GAP_S = 1.0
MEASURED = ("preemptions", "recomputed", "longest_gap", "goodput", "steady", "tokens_per_s", "refused")
BEFORE_S, LEAST_S = 20.0, 20.0  # of a fleet: without measuring, and with it
TTFT_S = 2.0  # beside the time in the queue
SHOWN_OF_FLEETS = (
    "workers", "load", "capacity", "goodput", "ttft_p99", "answered", "refused", "failed", "retries", "ejections",
    "computed",
)  # fmt: skip
SHOWN = ("pages", "capacity", "expects", *MEASURED)


@dataclass(frozen=True, slots=True)
class Work:
    """One request: when it comes, and how many tokens it has."""

    arrival: float
    prompt: list[int]
    outputs: int


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Handle:
    """A step whose result is there when the simulated device has ended it."""

    def __init__(self, output: StepOutput, ready_at: float, clock: Clock) -> None:
        self._output, self._ready_at, self._clock = output, ready_at, clock

    def done(self) -> bool:
        return self._ready_at <= self._clock.now

    def result(self) -> StepOutput:
        self._clock.now = max(self._clock.now, self._ready_at)
        return self._output


class Device(SimRunner):
    """The simulated device on a simulated clock, with outputs of given lengths."""

    def __init__(self, pool: KvPool, config: EngineConfig, clock: Clock, lengths: dict[int, int]) -> None:
        super().__init__(SETTINGS, pool, config, clock)
        self._time, self._by_room = clock, lengths
        self._ends = np.zeros(config.max_running, np.int64)
        self.chunk_tokens = 0

    def join(self, seq: Sequence) -> None:
        super().join(seq)
        self._ends[seq.slot] = self._by_room[seq.id.room]

    def launch(self, batch: HostBatch) -> Handle:  # type: ignore[override]
        self.chunk_tokens += sum(batch.chunk_lens)
        handle = super().launch(batch)
        return Handle(handle._output, self._free_at, self._time)

    def _sample(self, batch: HostBatch, corrupt: dict[int, Failure]) -> StepOutput:
        output = super()._sample(batch, corrupt)
        slots = batch.sample_slots
        known = self._lengths[slots] - self._num_prompt[slots]  # outputs before this one
        known[: batch.num_decode] += 1
        known[batch.num_decode :] += np.array([batch.chunk_lens[chunk] for chunk in batch.sampling_chunks], np.int64)
        output.tokens[known >= self._ends[slots] - 1] = SETTINGS.eos_token_id
        return output


@dataclass(slots=True)
class Times:
    """Of one request, in seconds of the simulated clock."""

    arrival: float
    tokens: list[float] = field(default_factory=list)
    ended: bool = False
    refused: bool = False

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrival

    @property
    def tpot(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / max(len(self.tokens) - 1, 1)

    @property
    def longest_gap(self) -> float:
        return max((b - a for a, b in itertools.pairwise(self.tokens)), default=0.0)


class System:
    def __init__(self, config: EngineConfig, work: list[Work], most_waiting: float, *, expects: bool) -> None:
        """`expects`: the scheduler keeps room for what it has learned of outputs."""
        self.clock = Clock()
        pool = KvPool(sim_layout(config, SETTINGS), config.num_pages)
        grammars, facts = Grammars(), ModelFacts(SETTINGS.vocab_size, frozenset((SETTINGS.eos_token_id,)))
        scheduler = make_scheduler(config, Role.UNIFIED, facts, self.clock, grammars)
        if not expects:
            scheduler.outputs.window = 0
        self.device = Device(pool, config, self.clock, {room: w.outputs for room, w in enumerate(work)})
        self.engine = Engine(config, scheduler, grammars, BatchBuilder(config, self.device.join), self.device, pool)
        self.work, self.most_waiting = work, most_waiting
        self.times = [Times(w.arrival) for w in work]

    def run(self) -> dict[str, Any]:
        """All requests to their ends; the counts of the run."""
        next_one = 0
        most_running = 0
        while next_one < len(self.work) or self.engine.has_work():
            if not self.engine.has_work():
                self.clock.now = max(self.clock.now, self.work[next_one].arrival)
            while next_one < len(self.work) and self.work[next_one].arrival <= self.clock.now:
                if self.engine.load().waiting < self.most_waiting:
                    self._submit(next_one)
                else:
                    self.times[next_one].refused = True
                next_one += 1
            for output in self.engine.step().outputs:
                self._take(output)
            most_running = max(most_running, self.engine.load().running)
        self.engine.check_idle()
        load = self.engine.load()
        return {
            "preemptions": load.counters["preemptions"],
            "recomputed": self.device.chunk_tokens - (load.counters["prompt_tokens"] - load.counters["cached_tokens"]),
            "outputs": load.counters["output_tokens"],
            "steps": load.counters["steps"],
            "most_running": most_running,
        }

    def _submit(self, room: int) -> None:
        sampling = SamplingParams(max_tokens=MOST_OUTPUTS, temperature=0.0)
        self.engine.submit(Submit(Request(id=RequestId(room, 0), token_ids=self.work[room].prompt, sampling=sampling)))

    def _take(self, output: SequenceOutput) -> None:
        times = self.times[output.id.room]
        times.tokens += [self.clock.now] * len(output.tokens)
        assert output.error is None, output.error
        if output.finish is not None:
            assert len(times.tokens) == self.work[output.id.room].outputs, "an output of another length"
            times.ended = True


def requests(count: int, rate: float, args: argparse.Namespace) -> list[Work]:
    """`rate` requests in a second, 0: all at once. Lengths are log-normal."""
    rng = random.Random(args.seed)
    now, work = 0.0, []
    for _ in range(count):
        now += rng.expovariate(rate) if rate else 0.0
        prompt = max(int(rng.lognormvariate(math.log(args.prompt), 0.5)), 16)
        outputs = min(max(int(rng.lognormvariate(math.log(args.output), args.sigma)), 2), MOST_OUTPUTS)
        tokens = [rng.randrange(16, SETTINGS.vocab_size) for _ in range(min(prompt, 4096))]
        work.append(Work(now, tokens, outputs))
    return work


def config_of(args: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        num_pages=args.pages + 1,
        max_model_len=8192,
        max_running=256,
        max_waiting=args.requests,
        max_prefill_tokens=2048,
        checks=("canary",),
    )


def capacity(args: argparse.Namespace) -> float:
    """Requests per second of a full engine, the better of both ways."""
    rates = []
    for expects in (False, True):
        work = requests(args.requests, 0.0, args)
        system = System(config_of(args), work, math.inf, expects=expects)
        system.run()
        rates.append(len(work) / system.clock.now)
    return max(rates)


def measure(args: argparse.Namespace, rate: float, *, expects: bool) -> dict[str, Any]:
    work = requests(args.requests, rate, args)
    system = System(config_of(args), work, args.waiting, expects=expects)
    counts = system.run()
    span = work[-1].arrival
    ended = [times for times in system.times if times.ended]
    good = [t for t in ended if t.ttft <= args.ttft and t.tpot <= args.tpot]
    longest = [t.longest_gap for t in ended]
    return {
        "expects": expects,
        "ended": len(ended),
        "refused": sum(times.refused for times in system.times),
        "preemptions": 1000 * counts["preemptions"] / len(ended),
        "recomputed": counts["recomputed"] / counts["outputs"],
        "goodput": len(good) / span,
        "steady": sum(t.longest_gap <= LONG_GAP_S for t in good) / span,
        "ended_per_s": len(ended) / span,
        "tokens_per_s": sum(at <= span for times in ended for at in times.tokens) / span,
        "most_running": counts["most_running"],
        "ttft": asdict(Summary.of([t.ttft for t in ended])),
        "tpot": asdict(Summary.of([t.tpot for t in ended])),
        "longest_gap": Summary.of(longest).p99,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--load", type=float, default=1.5, help="arrivals over the capacity")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--pages", type=int, nargs="+", default=[1000, 300], help="of each pool, 64 tokens each")
    parser.add_argument("--prompt", type=int, default=128, help="median tokens of a prompt")
    parser.add_argument("--output", type=int, default=512, help="median tokens of an output")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithm of an output's length")
    parser.add_argument("--waiting", type=int, default=16, help="requests that the engine queues; more are refused")
    parser.add_argument("--ttft", type=float, default=10.0, help="limit in seconds")
    parser.add_argument("--tpot", type=float, default=0.04, help="limit in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, nargs="+", default=[], help="of each fleet")
    parser.add_argument(
        "--loads", type=float, nargs="+", default=[1.0, 1.5, 2.0, 4.0], help="of a fleet, over capacity"
    )
    parser.add_argument(
        "--seconds", type=float, default=300.0, help="of the smallest fleet's run; larger ones' are shorter"
    )
    parser.add_argument("--queue", type=float, default=10.0, help="the router's timeouts.queue, seconds")
    parser.add_argument("--blind", action="store_true", help="workers report no room and no waits")
    args = parser.parse_args()
    if args.workers:
        fleets(args)
        return
    rows = [row for pages in args.pages for row in compare(argparse.Namespace(**{**vars(args), "pages": pages}))]
    for row in rows:
        print("".join(f"{name:>14} {row[name]:<9.4g}" for name in SHOWN))
    print_record(Record("overload", vars(args), {"rows": rows}))


def compare(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both ways in a pool of `args.pages` pages, at a rate in relation to the capacity of this pool."""
    most = capacity(args)
    facts = {"pages": args.pages, "capacity": most}
    return [facts | measure(args, args.load * most, expects=expects) for expects in (False, True)]


def fleets(args: argparse.Namespace) -> None:
    rows, each = [], fleet_capacity(args)
    for workers in args.workers:
        for load in args.loads:
            row = fleet_row(args, workers, load, each)
            rows.append(row)
            print("".join(f"{name:>14} {row[name]:<9.4g}" for name in SHOWN_OF_FLEETS), flush=True)
    print_record(Record("overload-fleet", vars(args), {"rows": rows}))


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a fleet, and of the requests that it gets. A prefill worker computes one prompt after the other, and a step of
    a decode worker always takes as long.
    """

    prefills: int = 1
    decodes: int = 2
    pool: int = 4096  # tokens of a decode worker
    step_s: float = 0.03
    prompt_tokens_per_s: float = 8000.0
    prompt: int = 300
    output: int = 300  # median of log-normal lengths
    sigma: float = 0.6  # of their logarithm
    max_tokens: int = 1200
    queue_s: float = 60.0  # timeouts.queue
    taught: bool = False  # decode workers have seen outputs before
    by_room: bool = True  # workers report their room; else only credits, and no waits, as before

    def fleet(self, rng: random.Random) -> Fleet:
        prefill = StepTimes(token_s=1 / self.prompt_tokens_per_s)
        machines = {
            "prefill": Machine(prefill, chunk=self.prompt, by_room=self.by_room),
            "decode": Machine(StepTimes(self.step_s), pool=self.pool, max_running=64, by_room=self.by_room),
        }
        seen = tuple(self.length(rng) for _ in range(LEAST)) if self.taught else ()
        return Fleet(Fleets({"prefill": self.prefills, "decode": self.decodes}, machines, self.queue_s, seen=seen))

    def length(self, rng: random.Random) -> int:
        return min(max(int(rng.lognormvariate(math.log(self.output), self.sigma)), 2), self.max_tokens)

    def request(self, rng: random.Random) -> FleetRequest:
        return FleetRequest(self.prompt, self.length(rng), self.max_tokens)

    def arrivals(self, rate: float, rng: random.Random) -> Iterator[tuple[float, FleetRequest]]:
        """`rate` requests in a second, at random: seconds after the one before, and the request."""
        while True:
            yield rng.expovariate(rate), self.request(rng)


def shape_of(args: argparse.Namespace, workers: int) -> Shape:
    prefills = max(workers // 4, 1)
    return Shape(prefills=prefills, decodes=workers - prefills, queue_s=args.queue, taught=True, by_room=not args.blind)


def fleet_capacity(args: argparse.Namespace) -> float:
    """Answers per second of one decode worker, in the smallest fleet while its queue is never empty."""
    shape, rng = replace(shape_of(args, min(args.workers)), by_room=True), random.Random(args.seed)
    fleet = shape.fleet(rng)
    fleet.run(BEFORE_S, shape.arrivals(shape.decodes, rng))
    began = fleet.now
    fleet.run(args.seconds, shape.arrivals(shape.decodes, rng))
    return sum(job.answered and job.ended_at > began for job in fleet.jobs) / args.seconds / shape.decodes


def fleet_row(args: argparse.Namespace, workers: int, load: float, each: float) -> dict[str, Any]:
    """What happens to the requests that end in a run at `load` times the capacity, after its first BEFORE_S."""
    shape, rng = shape_of(args, workers), random.Random(args.seed)
    fleet, rate = shape.fleet(rng), load * each * shape.decodes
    fleet.run(BEFORE_S, shape.arrivals(rate, rng))
    began, computed = fleet.now, fleet.computed
    seconds = max(args.seconds * min(args.workers) / workers, LEAST_S)
    fleet.run(seconds, shape.arrivals(rate, rng))
    ended = [job for job in fleet.jobs if began < job.ended_at < math.inf]
    answered = [job for job in ended if job.answered]
    good = [job for job in answered if job.ttft <= args.queue + TTFT_S and job.tpot <= 1.5 * shape.step_s]
    refused = [job for job in ended if not job.answered and job.flow.attempt < 0]
    return {
        "workers": workers,
        "load": load,
        "capacity": each * shape.decodes,
        "goodput": len(good) / seconds,
        "seconds": seconds,
        "ended": len(ended),
        "answered": len(answered),
        "refused": len(refused),
        "failed": len(ended) - len(answered) - len(refused),
        "at_once": sum(job.ended_at == job.arrival for job in refused),
        "retries": sum(fleet.retries.values()),
        "ejections": fleet.ejections,
        "computed": (fleet.computed - computed) / (shape.prompt * max(len(answered), 1)),
        "ttft": asdict(Summary.of([job.ttft for job in answered])),
        "ttft_p99": Summary.of([job.ttft for job in answered]).p99,
        "tpot": asdict(Summary.of([job.tpot for job in answered])),
    }


if __name__ == "__main__":
    main()
