"""More requests than the workers can serve, while workers are killed: `make chaos ARGS=--overload`.

Requests come at a multiple of the rate that the system has answered with a queue that was never empty. Each answer is
compared token by token. A refusal is an error before the first token, with 429 or 503 and a time to come back, and no
prompt of a refused request is computed. Whatever else ends without a whole answer is lost.
"""

import asyncio
import itertools
import logging
import random
import re
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from millrace.v1 import admin_pb2, admin_pb2_grpc
from millrace_load.record import percentile
from millrace_rpc.client import channel
from millrace_rpc.errors import TABLE

from millrace_testing.chaos import FAULTS, ROUTER_SET, Load, Seen, alarms, strike
from millrace_testing.chaos import Report as Streams
from millrace_testing.client import Client
from millrace_testing.nodes import TOKEN, System
from millrace_testing.samples import total

log = logging.getLogger(__name__)

FACTORS = (1.5, 2.0)  # times the capacity
CAPACITY_S, WARM_S = 30.0, 10.0  # of its measurement, and before it
CAPACITY_CLIENTS = 48
CALM_S = 8.0  # between two kills
KILLS = ("kill decode", "kill prefill")
QUEUE_S = 10.0  # timeouts.queue
WORKER_SET = (
    *("limits.checks=[canary]", "sim.step_s=0.03", "sim.token_s=0.00002"),
    *("limits.num_pages=161", "timeouts.lease=3"),
)
REFUSALS = ("QUEUE_FULL", "OVERLOADED", "NO_WORKERS")
EJECTED = re.compile(r"(\w+ worker (\S+) is ejected.*)")


class Arrivals(Load):
    """Requests that come whatever becomes of those before."""

    def __init__(self, system: System, report: Streams, rng: random.Random) -> None:
        super().__init__(system, report, 0, rng)
        self._running: set[asyncio.Task[None]] = set()
        self.sent = 0

    async def come(self, per_s: float) -> None:
        """For ever, at random times."""
        for turn in itertools.count():
            await asyncio.sleep(self._rng.expovariate(per_s))
            task = asyncio.create_task(self._request(self._routers[turn % len(self._routers)]))
            self.sent += 1
            self._running.add(task)
            task.add_done_callback(self._running.discard)

    async def ended(self) -> None:
        while self._running:
            await asyncio.wait(self._running)


@dataclass(slots=True)
class Phase:
    factor: float
    per_s: float
    seconds: float = 0.0
    sent: int = 0
    kills: int = 0
    streams: Streams = field(default_factory=Streams)
    computed: int = 0  # requests of which a prompt was sent to a worker

    @property
    def refused(self) -> list[Seen]:
        return [seen for seen in self.streams.seen if is_refusal(seen)]

    def row(self) -> dict[str, Any]:
        seen = self.streams.seen
        refused, failed = self.refused, [one for one in seen if one.error and not is_refusal(one)]
        first = sorted(one.first - one.start for one in seen if one.first)
        return {
            "factor": self.factor,
            "per_s": self.per_s,
            "seconds": self.seconds,
            "kills": self.kills,
            "sent": self.sent,
            "answered": len(seen) - len(refused) - len(failed),
            "refused": len(refused),
            "refused_at_once": sum(one.end - one.start < 1.0 for one in refused),
            "computed": self.computed,
            "computed_and_refused": max(self.computed - (len(seen) - len(refused)), 0),
            "lost": len(failed) + self.sent - len(seen),
            "errors": Counter(one.error for one in failed),
            "wrong_or_hung": len(self.streams.violations),
            "first_p50_s": percentile(first, 0.5) if first else 0.0,
            "first_p99_s": percentile(first, 0.99) if first else 0.0,
        }


def is_refusal(seen: Seen) -> bool:
    return (
        seen.error in REFUSALS and not seen.tokens and TABLE[seen.error].http in (429, 503) and seen.retry_after_s > 0
    )


@dataclass(slots=True)
class Report:
    capacity: float = 0.0  # answers per second
    phases: list[Phase] = field(default_factory=list)
    ejected: list[str] = field(default_factory=list)  # lines of logs about workers that nobody had killed
    alarms: list[str] = field(default_factory=list)  # about ranks that are taken for hung

    def broken(self) -> list[str]:
        """The bounds that do not hold."""
        rows = [phase.row() for phase in self.phases]
        bounds = ("lost", "wrong_or_hung", "computed_and_refused")
        counted = [f"at {row['factor']} times: {name} {row[name]}" for row in rows for name in bounds if row[name]]
        unlimited = [] if any(row["refused"] for row in rows) else ["nothing was refused: this was no overload"]
        return [*counted, *unlimited, *self.ejected, *self.alarms]

    def results(self) -> dict[str, Any]:
        counts = {"capacity": self.capacity, "healthy_ejected": len(self.ejected), "alarms": len(self.alarms)}
        return {"rows": [phase.row() for phase in self.phases], **counts}

    def table(self) -> str:
        head = "| load | kills | requests | answered | refused | in 1 s | lost | wrong or hung | first token p50, p99 |"
        lines = [head, "|---|---|---|---|---|---|---|---|---|"]
        for row in (phase.row() for phase in self.phases):
            names = ("kills", "sent", "answered", "refused", "refused_at_once", "lost", "wrong_or_hung")
            counts = " | ".join(str(row[name]) for name in names)
            lines.append(f"| {row['factor']} | {counts} | {row['first_p50_s']:.1f}, {row['first_p99_s']:.1f} s |")
        return "\n".join(lines)


async def overload(folder: Path, minutes: float, seed: int, factors: tuple[float, ...] = FACTORS) -> Report:
    report, rng, killed = Report(), random.Random(seed), set[str]()
    routers = (*ROUTER_SET, f"timeouts.queue={QUEUE_S}")
    async with System(folder, prefill=2, decode=2, routers=2, worker_set=WORKER_SET, router_set=routers) as system:
        report.capacity = await _capacity(system, rng)
        log.info("capacity: %.2f answers per second", report.capacity)
        for factor in factors:
            report.phases.append(
                await _phase(system, factor, factor * report.capacity, 60 * minutes / len(factors), rng, killed)
            )
        for router in system.routers:
            async with Client(router.address(), router.address("admin"), token=TOKEN) as client:
                await client.wait_whole(timeout=60)
        report.alarms = alarms(folder)
        said = "\n".join(path.read_text() for path in sorted(folder.glob("router-*.log")))
        report.ejected = [line for line, epoch in EJECTED.findall(said) if epoch not in killed]
    return report


async def _capacity(system: System, rng: random.Random) -> float:
    """Answers per second while the queue is never empty."""
    streams = Streams()
    load = Load(system, streams, CAPACITY_CLIENTS, rng)
    await asyncio.sleep(WARM_S)
    begun = time.monotonic()
    await asyncio.sleep(CAPACITY_S)
    answered = sum(seen.end > begun and not seen.error for seen in streams.seen)
    seconds = time.monotonic() - begun
    await load.stop()
    assert not streams.violations, streams.violations[:3]
    return answered / seconds


async def _phase(
    system: System, factor: float, per_s: float, seconds: float, rng: random.Random, killed: set[str]
) -> Phase:
    phase, begun, before = Phase(factor, per_s), time.monotonic(), await _computed(system)
    arrivals = Arrivals(system, phase.streams, rng)
    coming = asyncio.create_task(arrivals.come(per_s))
    faults = itertools.cycle([fault for fault in FAULTS if fault.name in KILLS])
    await asyncio.sleep(CALM_S)
    while time.monotonic() < begun + seconds:
        killed |= await _epochs(system)
        alive = killed.copy()
        phase.streams.observed.append(await strike(system, next(faults), rng, CALM_S))
        killed -= alive & await _epochs(system)  # of these processes none was killed
        phase.kills += 1
    coming.cancel()
    await arrivals.ended()
    await arrivals.stop()
    phase.seconds, phase.sent = time.monotonic() - begun, arrivals.sent
    phase.computed = await _computed(system) - before
    return phase


async def _epochs(system: System) -> set[str]:
    """Of the workers' present processes."""
    async with channel(system.routers[0].address("admin"), token=TOKEN) as ch:
        listed = await admin_pb2_grpc.AdminStub(ch).ListWorkers(admin_pb2.ListWorkersRequest())
    return {worker.info.epoch for worker in listed.workers}


async def _computed(system: System) -> int:
    """Requests that have reached a worker, by the routers' metrics."""
    urls = [f"http://{router.address('http')}" for router in system.routers]
    return int(sum([await total(url, "millrace_stage_seconds_count", stage="prefill") for url in urls]))
