"""Admission under overload: a fleet of simulated workers (fleet.py) that gets more than it can serve, under the
router's own queue, policy, flow and health. A quarter of the workers compute prompts. Only the seed decides.

    capacity   answers per second while the queue is never empty
    goodput    requests per second that met the limits of TTFT and TPOT
    refused    requests that no worker took; `failed`: others without an answer

python -m millrace_bench.overload --workers 4 40 400
"""

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from millrace_common.step_times import StepTimes
from millrace_load.options import CommandLine, number
from millrace_load.record import Record, Summary, print_record, printed
from millrace_serve.engine.schedule.expected import LEAST

from millrace_bench.fleet import Fleet, Fleets, Request
from millrace_bench.fleet_worker import Machine

BEFORE_S, LEAST_S = 20.0, 20.0  # of a fleet: without measuring, and with it
TTFT_S = 2.0  # beside the time in the queue


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

    def fleet(self, rng: random.Random) -> Fleet:
        prefill = StepTimes(token_s=1 / self.prompt_tokens_per_s)
        machines = {
            "prefill": Machine(prefill, chunk=self.prompt),
            "decode": Machine(StepTimes(self.step_s), pool=self.pool, max_running=64),
        }
        seen = tuple(self.length(rng) for _ in range(LEAST)) if self.taught else ()
        return Fleet(Fleets({"prefill": self.prefills, "decode": self.decodes}, machines, self.queue_s, seen=seen))

    def length(self, rng: random.Random) -> int:
        return min(max(int(rng.lognormvariate(math.log(self.output), self.sigma)), 2), self.max_tokens)

    def request(self, rng: random.Random) -> Request:
        return Request(self.prompt, self.length(rng), self.max_tokens)

    def arrivals(self, rate: float, rng: random.Random) -> Iterator[tuple[float, Request]]:
        """`rate` requests in a second, at random: seconds after the one before, and the request."""
        while True:
            yield rng.expovariate(rate), self.request(rng)


def shape_of(args: argparse.Namespace, workers: int) -> Shape:
    prefills = max(workers // 4, 1)
    return Shape(prefills=prefills, decodes=workers - prefills, queue_s=args.queue, taught=True)


def fleet_capacity(args: argparse.Namespace) -> float:
    """Answers per second of one decode worker, in the smallest fleet while its queue is never empty."""
    shape, rng = shape_of(args, min(args.workers)), random.Random(args.seed)
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


def main() -> None:
    parser = CommandLine("python -m millrace_bench.overload", __doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[4, 40, 400], help="workers of each fleet")
    parser.add_argument("--loads", type=float, nargs="+", default=[1.0, 1.5, 2.0, 4.0], help="times the capacity")
    parser.add_argument("--seconds", type=float, default=300.0, help="seconds of the smallest fleet; larger: less")
    parser.add_argument("--queue", type=float, default=10.0, help="the router's timeouts.queue, seconds")
    parser.add_argument("--seed", type=number(int), default=0)
    args = parser.parse_args()
    each = fleet_capacity(args)
    rows = printed(fleet_row(args, workers, load, each) for workers in args.workers for load in args.loads)
    print_record(Record("overload-fleet", vars(args), {"rows": rows}))


if __name__ == "__main__":
    main()
