"""What `bench pd` sends, and how: loads one after the other against one running system, from client processes.

Each client process sends its share of every segment's conversations. All begin at one moment, and all read one clock,
so their samples are merged exactly. A request belongs to its segment, whenever it ends.
"""

import asyncio
import itertools
import multiprocessing
import re
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from millrace_common import gc_hooks
from millrace_load.clients import Client, GrpcClient, HttpClient, Options, Sample, Target
from millrace_load.report import Report, Slo
from millrace_load.sending import send
from millrace_load.workload import Distribution, Plan, SharedPrefix, Workload, poisson_arrivals

LOAD = re.compile(r"(\d+)/(\d+)(?:x(\d+))?@(\d[\d.]*(?:,\d[\d.]*)*)")
WARMING = 8  # warm-up requests at a time


@dataclass(frozen=True, slots=True)
class Load:
    input_len: int  # new tokens of a turn
    output_len: int
    turns: int
    rates: tuple[float, ...]  # requests per second

    @classmethod
    def parse(cls, text: str) -> "Load":
        """ "4096/256@0.5,1" or "500/100x5@2". ValueError with the accepted form."""
        found = LOAD.fullmatch(text)
        try:
            assert found is not None
            load = cls(int(found[1]), int(found[2]), int(found[3] or 1), tuple(map(float, found[4].split(","))))
        except (AssertionError, ValueError):
            raise ValueError(f"load {text!r} is not of the form INPUT/OUTPUT[xTURNS]@RATE,RATE") from None
        if not min(load.input_len, load.output_len, load.turns, *load.rates) > 0:
            raise ValueError(f"load {text!r}: lengths, turns and rates must be above 0")
        return load

    @property
    def name(self) -> str:
        turns = f", {self.turns} turns" if self.turns > 1 else ""
        return f"{self.input_len} in, {self.output_len} out{turns}"

    @property
    def longest(self) -> int:
        """Tokens of a whole conversation."""
        return self.turns * (self.input_len + self.output_len)


@dataclass(frozen=True, slots=True)
class Segment:
    """A load at one rate, whose conversations begin within `seconds` from `begin_s` on."""

    load: Load
    rate: float  # requests per second
    seconds: float
    seed: int
    begin_s: float = 0.0

    def plan(self, target: Target, think_time: str) -> Plan:
        rate = self.rate / self.load.turns
        arrivals = list(itertools.takewhile(lambda at: at < self.seconds, poisson_arrivals(rate, self.seed)))
        plan = workload(self.load, target, think_time, 2 * self.seed).plan(len(arrivals))
        pairs = zip(plan.conversations, arrivals, strict=True)
        return replace(plan, conversations=tuple(replace(one, start_s=self.begin_s + at) for one, at in pairs))

    def row(self, samples: Sequence[Sample], start: float, slo: Slo) -> dict[str, Any]:
        """The report of its requests that are due within its time; goodput is theirs, for each of its seconds."""
        begin, end = start + self.begin_s, start + self.begin_s + self.seconds
        return {"load": self.load.name, "rate": self.rate, **windowed(samples, begin, end, slo)}


def windowed(samples: Sequence[Sample], begin: float, end: float, slo: Slo) -> dict[str, Any]:
    due = [sample for sample in samples if begin <= sample.due < end]
    found = Report.of(due, slo).as_dict()
    return found | {"requests": len(due), "goodput": found["slo_met"] * len(due) / (end - begin)}


def changing(loads: Sequence[Load], every: float, rounds: int, seed: int) -> list[Segment]:
    """The loads, each at its first rate for `every` seconds, one behind the other, `rounds` times."""
    turn = enumerate(itertools.chain.from_iterable(itertools.repeat(loads, rounds)))
    return [Segment(load, load.rates[0], every, seed + number, number * every) for number, load in turn]


def workload(load: Load, target: Target, think_time: str, seed: int) -> Workload:
    return Workload(
        turns=load.turns,
        input_len=Distribution.lengths(str(load.input_len)),
        output_len=Distribution.lengths(str(load.output_len)),
        think=Distribution.times(think_time),
        prefix=SharedPrefix(0, 0),
        vocab_size=target.vocab_size,
        max_context=target.max_context,
        seed=seed,
    )


@dataclass(frozen=True, slots=True)
class Clients:
    """Processes, each with its connections. Routers are taken in turns."""

    count: int
    over: str  # grpc or http
    grpc: tuple[str, ...]  # addresses of routers
    http: tuple[str, ...]  # their URLs
    think_time: str
    warmup: int

    async def send(self, segments: Sequence[Segment]) -> tuple[float, list[list[Sample]]]:
        """When all began, by time.perf_counter(), and the samples of each segment."""
        context, loop = multiprocessing.get_context("spawn"), asyncio.get_running_loop()
        together = context.Barrier(self.count)
        with ProcessPoolExecutor(self.count, context, _join, (together,)) as pool:
            calls = [loop.run_in_executor(pool, _client, self, number, segments) for number in range(self.count)]
            try:
                found = await asyncio.gather(*calls)
            except BaseException:
                for process in multiprocessing.active_children():  # else the pool waits for requests that hang
                    process.kill()
                raise
        samples = [[sample for _, parts in found for sample in parts[i]] for i in range(len(segments))]
        return min(start for start, _ in found), samples


_together: list[threading.Barrier] = []  # of a client process


def _join(together: threading.Barrier) -> None:
    _together.append(together)


def _client(clients: Clients, number: int, segments: Sequence[Segment]) -> tuple[float, list[list[Sample]]]:
    try:
        return asyncio.run(_share(clients, number, segments))
    except BaseException:
        _together[0].abort()  # the others would wait for this one
        raise


async def _share(clients: Clients, number: int, segments: Sequence[Segment]) -> tuple[float, list[list[Sample]]]:
    """What client process `number` sends of each segment."""
    router, options = number % len(clients.grpc), Options(0.0, ignore_eos=True)
    client: Client = GrpcClient(clients.grpc[router], options)
    target = await client.target()  # only gRPC says how many tokens there are to draw from
    if clients.over == "http":
        await client.close()
        client = HttpClient(clients.http[router], options)
    if number == 0:
        warmup = workload(replace(segments[0].load, turns=1), target, "0", 2 * segments[0].seed + 1)
        await send(client, warmup.plan(clients.warmup), WARMING, lambda: None)
    plans = [segment.plan(target, clients.think_time) for segment in segments]
    plans = [replace(plan, conversations=plan.conversations[number :: clients.count]) for plan in plans]
    gc_hooks.freeze()  # collections of this process would count as gaps of the server
    _together[0].wait()
    start = time.perf_counter()
    found = await asyncio.gather(*(send(client, plan, 0, lambda: None, start=start) for plan in plans))
    await client.close()
    return start, [[replace(sample, tokens=[], text="") for sample in samples] for samples in found]


def by_second(samples: Sequence[Sample], start: float, slo: Slo) -> tuple[Counter[int], Counter[int]]:
    """Requests by the second in which they are due, and those of them that met the limits."""
    good = [sample for sample in samples if sample.answered and slo.met_by(sample)]
    due, met = (Counter(int(sample.due - start) for sample in some) for some in (samples, good))
    return due, met
