"""Breaks a system of 2 prefill and 2 decode workers, or of 4 flexible ones whose duties change all the time, behind 2
routers while clients use it, and watches what they see.

Every request that was sent must either return exactly the simulated engine's tokens, or end with a clear error that
says that trying again may help, after nothing but a prefix of these tokens. Anything else, a request that hangs
included, is a violation.

All tiers of KV are on: a pool too small for the clients' conversations, pages in the host's memory, and a folder that
workers share, which runs full, is emptied, and whose files are torn. Prefill workers fetch from decode workers.

For each fault, from the moment it strikes until the next one:

    requests, retries  that ran, and attempts that the routers made again
    errors, error-free clients' errors, and when the last of them came (0: there was none)
    pause p99, longest that clients saw between two messages, the first one included: the longest of each request
    whole              when every router again sent requests to every worker. Healing begins after `hold` seconds
"""

import asyncio
import contextlib
import itertools
import logging
import math
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from millrace.v1 import worker_pb2, worker_pb2_grpc
from millrace_load.record import percentile
from millrace_rpc.client import channel
from millrace_rpc.errors import TABLE, MillraceError, from_rpc_error
from millrace_serve.engine.core import SamplingParams
from millrace_serve.engine.sim.runner import SPECIAL_TOKENS, SimSettings

from millrace_testing.client import Answer, Client, collect
from millrace_testing.nodes import TOKEN, Node, System
from millrace_testing.oracle import oracle_outputs
from millrace_testing.shared_disk import SharedDisk
from millrace_testing.throttle import throttled

log = logging.getLogger(__name__)

SIM_SET = ("limits.checks=[canary]", "sim.step_s=0.01", "sim.token_s=0.00005")
DISK_MIB = 16  # of the file system: 2,000 pages of two blocks
TIERS = ("limits.num_pages=257", "limits.host_cache_gib=0.002", "limits.disk_cache_gib=0.004")  # 500 and 1,000 pages
WORKER_SET = (*SIM_SET, *TIERS, "timeouts.lease=3")
ROUTER_SET = (
    *("timeouts.silence=2", "timeouts.handover=8", "timeouts.stall=8", "timeouts.prefill=15"),
    "prefill_policy=kv_aware",  # which names sources
)
COUNTS = {  # what the workers say of their tiers -> the name in the report
    'millrace_engine_total{.*what="cached_tokens"': "cached_tokens",
    'millrace_engine_total{.*what="host_cached_tokens"': "host_cached_tokens",
    'millrace_disk_pages_total{.*way="store"': "disk_stored_pages",
    'millrace_disk_pages_total{.*way="load"': "disk_loaded_pages",
    'millrace_prefix_fetch_pages_total{.*direction="fetched"': "fetched_pages",
}
COUNT_S = 2.0  # between two looks at them
MOST_TURNS = 2000  # tokens of a conversation that goes on
REQUEST_S = 90.0  # a request that takes longer hangs
HOLD_S = 4.0  # of a pause or partition: longer than a router's patience with a silent worker
HUNG = re.compile(
    r"ranks: rank .* hangs: |lost: (no progress for|it is silent)|STALLED: no progress for "
    r"|pages from .* is stuck: |has sent nothing for "
)
THROTTLED = {"": (), "ranks": (1,), "all": (0, 1)}  # 0: routers and frontends, 1: ranks
STOPS = ("stop rank", "hang step")  # a worker says that a rank hangs, once, and ends
PAUSE_S = 0.1  # between two messages, above which it is noted
CALM_S = 1.0  # between a healed fault and the next one
DUTIES_S = 5.0  # between two changes of the duties
DUTIES = (worker_pb2.DUTY_PREFILL, worker_pb2.DUTY_DECODE, worker_pb2.DUTY_BOTH)


Action = Callable[[System, Any], object]  # on its victim, a node or the disk; what it returns is awaited if it can be


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    launch_delay_s: float
    strike: Action
    heal: Action | None

    @property
    def role(self) -> str:
        """Of its victims; disk: it has none."""
        return self.name.split()[-1]


async def _replace(system: System, node: Node) -> None:
    """A worker ends by itself when a rank of it hangs."""
    assert await node.ended() == 1
    node.hanging.unlink(missing_ok=True)
    await node.start()


async def _drain(system: System, node: Node) -> None:
    assert await node.terminate() == 0


async def _start(system: System, node: Node) -> None:
    await node.start()


def _fill(system: System, disk: SharedDisk) -> None:
    disk.fill()
    assert disk.is_full()


WORKERS = ("prefill", "decode", "flexible")
KINDS: tuple[tuple[str, float, Action, Action | None, Sequence[str]], ...] = (
    ("kill", 0.0, lambda _, node: node.kill(), _start, (*WORKERS, "router")),
    ("pause", HOLD_S, lambda _, node: node.send(signal.SIGSTOP), lambda _, node: node.send(signal.SIGCONT), WORKERS),
    ("stop rank of", 0.0, lambda _, node: node.processes[1].suspend(), _replace, WORKERS),
    ("hang step of", 0.0, lambda _, node: node.hanging.write_text(str(node.processes[1].pid)), _replace, WORKERS),
    (
        "stop frontend of",
        HOLD_S,
        lambda _, node: node.processes[0].suspend(),
        lambda _, node: node.processes[0].resume(),
        WORKERS,
    ),
    ("partition", HOLD_S, System.cut, System.join, WORKERS),
    ("drain", 0.0, _drain, _start, WORKERS),
    ("fill the", HOLD_S, _fill, lambda _, disk: disk.free(), ("disk",)),
    ("tear pages of the", HOLD_S, lambda _, disk: disk.tear(random.Random(len(disk.pages()))), None, ("disk",)),
    ("lose the", HOLD_S, lambda _, disk: disk.lose(), None, ("disk",)),
)
FAULTS = tuple(Fault(f"{what} {role}", *rest) for what, *rest, roles in KINDS for role in roles)


@dataclass(slots=True)
class Seen:
    """One request, as its client saw it. Times are of time.monotonic()."""

    start: float
    end: float = 0.0
    pauses: list[tuple[float, float]] = field(default_factory=list)  # between messages: their end, and seconds
    error: str = ""  # reason; empty: complete, or hung up on purpose
    retry_after_s: float = 0.0  # that the error told
    first: float = 0.0  # when the first message came; 0: none
    tokens: int = 0  # that came, each of them compared


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
    alarms: list[str] = field(default_factory=list)  # lines of logs that take somebody for hung
    tiers: Counter[str] = field(default_factory=Counter)  # COUNTS, over all lives of all workers
    duties: Counter[str] = field(default_factory=Counter)  # that workers took, by name

    def pauses(self, fault: str) -> list[float]:
        """The longest pause of each request that ran during a fault of this name, ascending."""
        touched = [
            (one.at, end, seen) for one, end in self._spans() for seen in self._touched(one, end) if one.fault == fault
        ]
        return sorted(
            max((s for at, s in seen.pauses if start <= at < end), default=0.0) for start, end, seen in touched
        )

    def _touched(self, one: Observed, end: float) -> list[Seen]:
        return [seen for seen in self.seen if seen.start < end and seen.end > one.at]

    def _spans(self) -> Iterator[tuple[Observed, float]]:
        """Each fault that struck, and when the next one did."""
        return zip(self.observed, [*(one.at for one in self.observed[1:]), float("inf")], strict=False)

    def rows(self) -> Iterator[dict[str, float | str]]:
        """One for each fault that struck."""
        for one, end in self._spans():
            touched = self._touched(one, end)
            errors = [seen.end - one.at for seen in touched if seen.error and one.at <= seen.end < end]
            yield {
                "fault": one.fault,
                "requests": len(touched),
                "retries": one.retries,
                "errors": len(errors),
                "error_free_s": max(errors, default=0.0),
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
        for name, sums in found.items():
            pauses = self.pauses(name)
            if pauses:
                p50, p99 = (pauses[math.ceil(q * len(pauses)) - 1] for q in (0.5, 0.99))
                sums |= {"pause_p50_s": p50, "pause_p99_s": p99, "pause_s": pauses[-1]}
        return [found[name] for name in sorted(found)]

    def false_alarms(self) -> int:
        """Ranks said to hang, beyond one for each that a fault stopped."""
        stopped = sum(one.fault.startswith(STOPS) for one in self.observed)
        hangs = sum("hangs: " in line for line in self.alarms)
        return hangs - stopped

    def results(self) -> dict[str, Any]:
        """Of the whole run; `pause` counts the longest of each request, 0 where none was above PAUSE_S."""
        longest = sorted(max((s for _, s in seen.pauses), default=0.0) for seen in self.seen)
        return {
            "faults": self.by_fault(),
            **({f"pause_p{q}_s": percentile(longest, q / 100) for q in (50, 99, 100)} if longest else {}),
            "requests": len(self.seen),
            "tokens": sum(seen.tokens for seen in self.seen),
            "errors": dict(Counter(seen.error for seen in self.seen if seen.error)),
            "alarms": len(self.alarms),
            "false_alarms": self.false_alarms(),
            "violations": len(self.violations),
            "tiers": dict(self.tiers),
            "duties": dict(self.duties),
        }

    def broken(self) -> list[str]:
        return self.violations

    def table(self) -> str:
        head = "| fault | times | requests | retries | errors | error-free after | pause p99 | longest | whole after |"
        lines = [head, "|---|---|---|---|---|---|---|---|---|"]
        for row in self.by_fault():
            counts = " | ".join(f"{row[key]:.0f}" for key in ("times", "requests", "retries", "errors"))
            times = " | ".join(
                f"{row.get(key, 0.0):.1f} s" for key in ("error_free_s", "pause_p99_s", "pause_s", "whole_s")
            )
            lines.append(f"| {row['fault']} | {counts} | {times} |")
        return "\n".join(lines)


class Load:
    """Clients that send one request after the other, each time to the next router: greedy, seeded, with
    log-probabilities, short and long, new ones and next turns of conversations; one in twenty hangs up.
    """

    def __init__(self, system: System, report: Report, clients: int, rng: random.Random) -> None:
        self._routers = [Client(router.address()) for router in system.routers]
        self._turn = itertools.count()
        self._report = report
        self._rng = rng
        self._stopping = False
        self._conversations: deque[list[int]] = deque(maxlen=100)  # prompts with their outputs
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
        prompt = self._prompt()
        sampling = {"max_tokens": rng.choice((1, 20, 100, 250)), "temperature": rng.choice((0.0, 1.0))}
        seed, logprobs = rng.getrandbits(32), rng.random() < 0.3
        wanted = oracle_outputs(prompt, SamplingParams(**sampling, seed=seed, ignore_eos=True), settings)
        sent = dict(sampling, seed=seed, ignore_eos=True, timeout=REQUEST_S, **({"logprobs": 2} if logprobs else {}))
        leave_after = rng.randrange(len(wanted)) if rng.random() < 0.05 else len(wanted) + 1
        seen, answer = Seen(time.monotonic()), Answer()
        try:
            await _read(router.stream(prompt, **sent), answer, seen, leave_after)
            complete = answer.tokens == wanted and answer.finish == "length"
            if complete and len(prompt) + len(wanted) < MOST_TURNS:
                self._conversations.append(prompt + wanted)
            ok = complete or (len(answer.tokens) > leave_after and answer.tokens == wanted[: len(answer.tokens)])
            ok = ok and (not logprobs or [one.sampled.token_id for one in answer.logprobs] == answer.tokens)
            problem = "" if ok else f"{answer.finish}, {len(answer.tokens)} of {len(wanted)} tokens, or wrong ones"
        except grpc.aio.AioRpcError as failure:
            error = from_rpc_error(failure)
            seen.error, seen.retry_after_s = str(error.reason), error.retry_after_s
            problem = "" if retryable(error) and answer.tokens == wanted[: len(answer.tokens)] else repr(failure)
        seen.end, seen.tokens = time.monotonic(), len(answer.tokens)
        self._report.seen.append(seen)
        if problem:
            self._report.violations.append(problem)
        if seen.error:
            await asyncio.sleep(0.2)

    def _prompt(self) -> list[int]:
        """A new one, or the next turn of a conversation."""
        rng, vocab_size = self._rng, SimSettings().vocab_size
        said = rng.choice(self._conversations) if self._conversations and rng.random() < 0.6 else []
        length = rng.choice((5, 100)) if said else rng.choice((5, 100, 700, 2000))
        return said + [rng.randrange(SPECIAL_TOKENS, vocab_size) for _ in range(length)]


async def _read(call: grpc.aio.UnaryStreamCall, answer: Answer, seen: Seen, leave_after: int) -> None:
    before = seen.start
    async for chunk in call:
        collect(answer, chunk)
        now = time.monotonic()
        seen.first = seen.first or now
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


async def count_tiers(system: System, tiers: Counter[str]) -> None:
    """Add what the workers' counters grow by, for ever. A worker that starts again counts from 0."""
    before: dict[tuple[str, str], float] = {}
    async with httpx.AsyncClient(timeout=5) as http:
        while True:
            for worker in system.workers:
                with contextlib.suppress(httpx.TransportError):
                    text = (await http.get(f"http://{worker.address('metrics')}/metrics")).text
                    for pattern, name in COUNTS.items():
                        found = re.findall(rf"^{pattern}.* (\S+)$", text, re.MULTILINE)
                        now, key = sum(map(float, found)), (worker.name, name)
                        tiers[name] += int(now - before.get(key, 0.0) if now >= before.get(key, 0.0) else now)
                        before[key] = now
            await asyncio.sleep(COUNT_S)


async def change_duties(system: System, taken: Counter[str], rng: random.Random) -> None:
    """Give each worker a duty by chance, again and again. A worker that is broken takes none."""
    while True:
        await asyncio.gather(*(give_duty(worker, rng.choice(DUTIES), taken) for worker in system.workers))
        await asyncio.sleep(DUTIES_S)


async def give_duty(worker: Node, duty: worker_pb2.Duty, taken: Counter[str]) -> None:
    async with channel(worker.address(), token=TOKEN) as ch:
        with contextlib.suppress(grpc.aio.AioRpcError):
            request = worker_pb2.SetDutyRequest(duty=duty, router_id="chaos", why="another one by chance")
            await worker_pb2_grpc.WorkerServiceStub(ch).SetDuty(request, timeout=1)
            taken[worker_pb2.Duty.Name(duty)] += 1


async def strike(system: System, fault: Fault, rng: random.Random, calm_s: float) -> Observed:
    """One fault from its beginning until the system is whole again, and calm for a while."""
    nodes = (*system.workers, *system.routers)
    victim = system.disk if fault.role == "disk" else rng.choice([node for node in nodes if node.role == fault.role])
    before = await retries(system)
    observed = Observed(fault.name, time.monotonic())
    for action, seconds in ((fault.strike, fault.launch_delay_s), (fault.heal, 0.0)):
        if action is not None and isinstance(done := action(system, victim), Awaitable):
            await done
        await asyncio.sleep(seconds)
    await system.whole()
    observed.whole_s = time.monotonic() - observed.at
    await asyncio.sleep(calm_s)
    observed.retries = max(await retries(system) - before, 0.0)
    log.info("%s (%s): whole after %.1f s", fault.name, getattr(victim, "name", ""), observed.whole_s)
    return observed


async def chaos(
    folder: Path,
    faults: Iterable[Fault],
    clients: int,
    seed: int,
    calm_s: float = CALM_S,
    namespaces: bool = False,
    flexible: bool = False,
) -> Report:
    """Strike with one fault after the other. At the end every page of every worker must be free again. `flexible`: all
    workers are, and their duties change every DUTIES_S.
    """
    report, rng = Report(), random.Random(seed)
    settings = {"worker_set": WORKER_SET, "router_set": ROUTER_SET, "namespaces": namespaces, "disk_mib": DISK_MIB}
    roles = {"flexible": 4} if flexible else {"prefill": 2, "decode": 2}
    async with System(folder, **roles, routers=2, **settings) as system, asyncio.TaskGroup() as beside:
        assert system.disk is not None
        load = Load(system, report, clients, rng)
        tasks = [beside.create_task(count_tiers(system, report.tiers))]
        if flexible:
            tasks.append(beside.create_task(change_duties(system, report.duties, random.Random(seed))))
        await asyncio.sleep(calm_s)
        for fault in faults:
            if fault.strike is not _fill or system.disk.bounded:
                report.observed.append(await strike(system, fault, rng, calm_s))
        await load.stop()
        await asyncio.sleep(2 * COUNT_S)
        for task in tasks:
            task.cancel()
        report.alarms = alarms(folder)
        for router in system.routers:
            async with Client(router.address(), router.address("admin"), token=TOKEN) as client:
                await client.wait_whole(timeout=60)
    return report


def alarms(folder: Path) -> list[str]:
    """What the logs say of hung ranks and of links without progress."""
    lines = (line for path in sorted(folder.glob("*.log")) for line in path.read_text().splitlines())
    return [line for line in lines if HUNG.search(line)]


async def calm(folder: Path, minutes: float, clients: int, seed: int, throttle: str = "") -> Report:
    """Load without faults. Nobody may be taken for hung. `throttle`: which processes get a fifth of the time."""
    report = Report()
    async with System(folder, prefill=2, decode=2, routers=2, worker_set=SIM_SET) as system:
        processes = [node.processes for node in (*system.workers, *system.routers)]
        pids = [p.pid for of in processes for index, p in enumerate(of) if min(index, 1) in THROTTLED[throttle]]
        load = Load(system, report, clients, random.Random(seed))
        with throttled(pids):
            await asyncio.sleep(60 * minutes)
        await load.stop()
        report.alarms = alarms(folder)
        report.violations += report.alarms
    return report


@contextlib.contextmanager
def burning(count: int) -> Iterator[None]:
    """So many processes keep the cores busy."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def faults_of(flexible: bool, only: str = "") -> list[Fault]:
    """Those that a system of fixed or of flexible workers can have, and in whose names `only` is found."""
    absent = ("prefill", "decode") if flexible else ("flexible",)
    return [fault for fault in FAULTS if fault.role not in absent and re.search(only, fault.name)]


def shuffled(faults: Sequence[Fault], minutes: float, seed: int) -> Iterator[Fault]:
    """All again and again, in another order each time, until the time is over."""
    end, rng = time.monotonic() + 60 * minutes, random.Random(seed)
    while True:
        for fault in rng.sample(faults, len(faults)):
            if time.monotonic() > end:
                return
            yield fault
