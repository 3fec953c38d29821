"""Breaks a system of 2 prefill and 2 decode workers behind 2 routers while clients use it, and watches what they see.

    make chaos ARGS="--minutes 3"

Every request that was sent must either return exactly the simulated engine's tokens, or end with a clear error that
says that trying again may help, after nothing but a prefix of these tokens. Anything else, a request that hangs
included, is a violation.

For each fault, from the moment it strikes until the next one:

    requests, retries  that ran, and attempts that the routers made again
    errors, error-free clients' errors, and when the last of them came (0: there was none)
    longest pause      that any client saw between two messages, its first one included
    whole              when every router again sent requests to every worker. Healing begins after `hold` seconds
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import logging
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import httpx
from millrace_bench.common import Record, print_record
from millrace_rpc.errors import TABLE, MillraceError, from_rpc_error
from millrace_serve.engine.core import SamplingParams
from millrace_serve.engine.sim.runner import SPECIAL_TOKENS, SimSettings

from millrace_testing.client import Answer, Client, collect
from millrace_testing.namespaces import available
from millrace_testing.nodes import Node, System
from millrace_testing.oracle import oracle_outputs

log = logging.getLogger(__name__)

WORKER_SET = ("limits.canary=true", "timeouts.lease=3", "sim.step_s=0.01", "sim.token_s=0.00005")
ROUTER_SET = ("timeouts.silence=2", "timeouts.handover=8", "timeouts.stall=8", "timeouts.prefill=15")
REQUEST_S = 90.0  # a request that takes longer hangs
HOLD_S = 4.0  # of a pause or partition: longer than a router's patience with a silent worker
PAUSE_S = 0.1  # between two messages, above which it is noted
CALM_S = 1.0  # between a healed fault and the next one


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    hold_s: float
    strike: Callable[[System, str], Awaitable[None]]  # both are given the victim's name
    heal: Callable[[System, str], Awaitable[None]]


async def _kill(system: System, name: str) -> None:
    await system.node(name).kill()


async def _start(system: System, name: str) -> None:
    await system.node(name).start()


async def _pause(system: System, name: str) -> None:
    system.node(name).send(signal.SIGSTOP)


async def _resume(system: System, name: str) -> None:
    system.node(name).send(signal.SIGCONT)


async def _partition(system: System, name: str) -> None:
    system.cut(name)


async def _rejoin(system: System, name: str) -> None:
    system.join(name)


async def _drain(system: System, name: str) -> None:
    assert await system.node(name).terminate() == 0


FAULTS = tuple(
    Fault(f"{what} {role}", hold_s, strike, heal)
    for what, hold_s, strike, heal, roles in (
        ("kill", 0.0, _kill, _start, ("prefill", "decode", "router")),
        ("pause", HOLD_S, _pause, _resume, ("prefill", "decode")),
        ("partition", HOLD_S, _partition, _rejoin, ("prefill", "decode")),
        ("drain", 0.0, _drain, _start, ("prefill", "decode")),
    )
    for role in roles
)


@dataclass(slots=True)
class Seen:
    """One request, as its client saw it. Times are of time.monotonic()."""

    start: float
    end: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)  # between messages: their end, and seconds
    error: str = ""  # reason; empty: complete, or hung up on purpose


@dataclass(slots=True)
class Observed:
    fault: str
    at: float
    whole_s: float = 0.0
    retries: float = 0.0


@dataclass(slots=True)
class Report:
    observed: list[Observed] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def rows(self) -> Iterator[dict[str, float | str]]:
        """One for each fault that struck."""
        ends = [*(one.at for one in self.observed[1:]), float("inf")]
        for one, end in zip(self.observed, ends, strict=True):
            touched = [seen for seen in self.seen if seen.start < end and seen.end > one.at]
            errors = [seen.end - one.at for seen in touched if seen.error and one.at <= seen.end < end]
            yield {
                "fault": one.fault,
                "requests": len(touched),
                "retries": one.retries,
                "errors": len(errors),
                "error_free_s": max(errors, default=0.0),
                "pause_s": max((s for seen in touched for at, s in seen.pauses if one.at <= at < end), default=0.0),
                "whole_s": one.whole_s,
            }

    def by_fault(self) -> list[dict[str, float | str]]:
        """Sums of counts and maxima of times, over the rows of a kind."""
        found: dict[str, dict[str, float | str]] = {}
        for row in self.rows():
            sums = found.setdefault(str(row["fault"]), {"fault": row["fault"], "times": 0})
            sums["times"] = int(sums["times"]) + 1
            for key, value in row.items():
                if key != "fault":
                    before = float(sums.get(key, 0.0))
                    sums[key] = max(before, float(value)) if key.endswith("_s") else before + float(value)
        return [found[name] for name in sorted(found)]

    def table(self) -> str:
        head = "| fault | times | requests | retries | errors | error-free after | longest pause | whole after |"
        lines = [head, "|---|---|---|---|---|---|---|---|"]
        for row in self.by_fault():
            counts = " | ".join(f"{row[key]:.0f}" for key in ("times", "requests", "retries", "errors"))
            times = " | ".join(f"{row[key]:.1f} s" for key in ("error_free_s", "pause_s", "whole_s"))
            lines.append(f"| {row['fault']} | {counts} | {times} |")
        return "\n".join(lines)


class Load:
    """Clients that send one request after the other, each time to the next router: greedy, seeded, with
    log-probabilities, short and long; one in twenty hangs up.
    """

    def __init__(self, system: System, report: Report, clients: int, rng: random.Random) -> None:
        self._routers = [Client(router.address()) for router in system.routers]
        self._turn = itertools.count()
        self._report = report
        self._rng = rng
        self._stopping = False
        self._tasks = [asyncio.create_task(self._client()) for _ in range(clients)]

    async def stop(self) -> None:
        """Every request that runs comes to its end."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        for router in self._routers:
            await router.__aexit__()

    async def _client(self) -> None:
        while not self._stopping:
            await self._request(self._routers[next(self._turn) % len(self._routers)])

    async def _request(self, router: Client) -> None:
        rng, settings = self._rng, SimSettings()
        prompt = [rng.randrange(SPECIAL_TOKENS, settings.vocab_size) for _ in range(rng.choice((5, 100, 700, 2000)))]
        sampling = {"max_tokens": rng.choice((1, 20, 100, 250)), "temperature": rng.choice((0.0, 1.0))}
        seed, logprobs = rng.getrandbits(32), rng.random() < 0.3
        wanted = oracle_outputs(prompt, SamplingParams(**sampling, seed=seed, ignore_eos=True), settings)
        sent = dict(sampling, seed=seed, ignore_eos=True, timeout=REQUEST_S, **({"logprobs": 2} if logprobs else {}))
        leave_after = rng.randrange(len(wanted)) if rng.random() < 0.05 else len(wanted) + 1
        seen, answer = Seen(time.monotonic()), Answer()
        try:
            await _read(router.stream(prompt, **sent), answer, seen, leave_after)
            complete = answer.tokens == wanted and answer.finish == "length"
            ok = complete or (len(answer.tokens) > leave_after and answer.tokens == wanted[: len(answer.tokens)])
            ok = ok and (not logprobs or [one.sampled.token_id for one in answer.logprobs] == answer.tokens)
            problem = "" if ok else f"{answer.finish}, {len(answer.tokens)} of {len(wanted)} tokens, or wrong ones"
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
            seen.error = str(error.reason)
            problem = "" if retryable(error) and answer.tokens == wanted[: len(answer.tokens)] else repr(failure)
        seen.end = time.monotonic()
        self._report.seen.append(seen)
        if problem:
            self._report.violations.append(problem)
        if seen.error:
            await asyncio.sleep(0.2)


async def _read(call: grpc.aio.UnaryStreamCall, answer: Answer, seen: Seen, leave_after: int) -> None:
    before = seen.start
    async for chunk in call:
        collect(answer, chunk)
        now = time.monotonic()
        if now - before > PAUSE_S:
            seen.pauses.append((now, now - before))
        before = now
        if len(answer.tokens) > leave_after:
            call.cancel()
            return


def retryable(error: MillraceError) -> bool:
    """Whether the error tells its reader that trying again may help."""
    return error.retry_after_s > 0 or TABLE[error.reason].code is grpc.StatusCode.UNAVAILABLE


async def retries(system: System) -> float:
    """Of all routers since their start. One that does not answer has none."""
    total = 0.0
    async with httpx.AsyncClient(timeout=5) as http:
        for router in system.routers:
            try:
                text = (await http.get(f"http://{router.address('http')}/metrics")).text
            except httpx.TransportError:
                continue
            lines = (line for line in text.splitlines() if line.startswith("millrace_retries_total"))
            total += sum(float(line.rpartition(" ")[2]) for line in lines)
    return total


async def strike(system: System, fault: Fault, rng: random.Random, calm_s: float) -> Observed:
    """One fault from its beginning until the system is whole again, and calm for a while."""
    role = fault.name.split()[-1]
    nodes: list[Node] = system.routers if role == "router" else system.workers
    victim = rng.choice([node.name for node in nodes if node.role == role])
    before = await retries(system)
    observed = Observed(fault.name, time.monotonic())
    await fault.strike(system, victim)
    await asyncio.sleep(fault.hold_s)
    await fault.heal(system, victim)
    await system.whole()
    observed.whole_s = time.monotonic() - observed.at
    await asyncio.sleep(calm_s)
    observed.retries = max(await retries(system) - before, 0.0)
    log.info("%s (%s): whole after %.1f s", fault.name, victim, observed.whole_s)
    return observed


async def chaos(
    folder: Path, faults: Iterator[Fault], clients: int, seed: int, calm_s: float = CALM_S, namespaces: bool = False
) -> Report:
    """Strike with one fault after the other. At the end every page of every worker must be free again."""
    report, rng = Report(), random.Random(seed)
    settings = {"worker_set": WORKER_SET, "router_set": ROUTER_SET, "namespaces": namespaces}
    async with System(folder, prefill=2, decode=2, routers=2, **settings) as system:
        load = Load(system, report, clients, rng)
        await asyncio.sleep(calm_s)
        for fault in faults:
            report.observed.append(await strike(system, fault, rng, calm_s))
        await load.stop()
        for router in system.routers:
            async with Client(router.address(), router.address("admin")) as client:
                await client.wait_whole(timeout=60)
    return report


def shuffled(minutes: float, seed: int) -> Iterator[Fault]:
    """All of them again and again, in another order each time, until the time is over."""
    end, rng = time.monotonic() + 60 * minutes, random.Random(seed)
    while True:
        for fault in rng.sample(FAULTS, len(FAULTS)):
            if time.monotonic() > end:
                return
            yield fault


def main() -> None:
    parser = argparse.ArgumentParser(prog="make chaos", formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--minutes", type=float, default=3.0, help="how long")
    parser.add_argument("--clients", type=int, default=12, help="requests at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the order of faults and of the load")
    settings = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder = Path(tempfile.mkdtemp(prefix="millrace-chaos-"))
    faults = shuffled(settings.minutes, settings.seed)
    spaces = available()
    log.info("workers are cut off by %s", "network namespaces" if spaces else "proxies that let nothing through")
    # not on uvloop, which forks: between threads of gRPC a child of it may crash before it has become a worker
    report = asyncio.run(chaos(folder, faults, settings.clients, settings.seed, namespaces=spaces))
    errors = Counter(seen.error for seen in report.seen if seen.error)
    print(report.table())  # noqa: T201
    print(f"{len(report.seen)} requests, clear errors: {dict(errors)}")  # noqa: T201
    results = {"faults": report.by_fault(), "requests": len(report.seen), "violations": len(report.violations)}
    print_record(Record("chaos", vars(settings), results))
    if report.violations:
        listed = "\n".join(report.violations[:10])
        raise SystemExit(f"{len(report.violations)} violations, the first ones:\n{listed}\nlogs: {folder}")


if __name__ == "__main__":
    main()
