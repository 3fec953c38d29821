"""A fleet of simulated workers on a simulated clock, under the router's own queue, policy, flow and health.

A prefill worker computes one prompt after the other. A decode worker gives each of its sequences a token per step, and
its pool has room for so many tokens; it admits, preempts and promises room by the same functions as the engine. What a
worker would say it says at the end of each tick, and the router learns its load then.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from millrace.v1 import common_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_router.config import Policy, RouterConfig, Routing, Timeouts
from millrace_router.flow.flow import AbortSubRequest, Action, Blame, Flow, Retry, Stage, SubRequest
from millrace_router.flow.metrics import build
from millrace_router.health.workers import WorkerHealth
from millrace_router.policy.choose import Chooser, Decision, Situation
from millrace_router.policy.snapshot import Key, Pace, PlacementRequest, Replica, View
from millrace_router.queue.admission import Admission
from millrace_router.queue.fair_queue import Ticket
from millrace_rpc.errors import MillraceError
from millrace_serve.engine.schedule.expected import LEAST, Outputs, need, room
from millrace_serve.engine.schedule.prefill import QUEUE_S
from millrace_serve.engine.schedule.waiting import LOOK_S

TICK_S = 0.1
LENGTH = common_pb2.FINISH_REASON_LENGTH


@dataclass(frozen=True, slots=True)
class Shape:
    prefills: int = 1
    decodes: int = 2
    pool: int = 4096  # tokens of a decode worker
    step_s: float = 0.03
    prompt_tokens_per_s: float = 8000.0
    prompt: int = 300
    output: int = 300  # median of log-normal lengths
    sigma: float = 0.6  # of their logarithm
    max_tokens: int = 1200
    max_running: int = 64
    queue_s: float = 60.0  # timeouts.queue
    taught: bool = False  # decode workers have seen outputs before
    by_room: bool = True  # workers report their room; else only capacity, and no waits, as before


@dataclass(slots=True, eq=False)
class Part:
    """An attempt at one worker."""

    job: Job
    attempt: int
    order: int
    came: float
    tokens: int  # of the prompt, replayed outputs included
    began: float = math.inf
    made: int = 0  # outputs of this attempt
    base: int = 0  # of them, before it began last
    waits: bool = False  # as it was told


class Prefill:
    sub = SubRequest.PREFILL

    def __init__(self, name: str, shape: Shape) -> None:
        self.name, self.shape = name, shape
        self.parts: deque[Part] = deque()
        self.free_at = 0.0
        self.computed = 0

    def add(self, part: Part, now: float) -> None:
        part.began = max(now, self.free_at)
        self.free_at = part.began + part.tokens / self.shape.prompt_tokens_per_s
        self.computed += part.tokens
        self.parts.append(part)

    def drop(self, job: Job) -> None:
        for part in [part for part in self.parts if part.job is job]:
            self.parts.remove(part)  # what it costs stays

    def tick(self, now: float) -> None:
        while self.parts and self.parts[0].began + self.parts[0].tokens / self.shape.prompt_tokens_per_s <= now:
            part = self.parts.popleft()
            part.job.hear(self, part, 1)
        if self.shape.by_room:
            for part in self.parts:
                part.job.told(self, part, waits=part.began > now > part.came + LOOK_S)

    def replica(self, now: float) -> Replica:
        speed = self.shape.prompt_tokens_per_s
        waiting = int(max(self.free_at - now, 0.0) * speed)
        most = int(speed * QUEUE_S) if self.shape.by_room else 1 << 60
        return Replica(
            self.name, 0, self.name, "f", capacity=320 - len(self.parts), tokens=waiting,
            sequences=len(self.parts), room=most - waiting, prompt_tokens_per_s=speed,
        )  # fmt: skip


class Decode:
    sub = SubRequest.DECODE

    def __init__(self, name: str, shape: Shape, sources: frozenset[str], seen: list[int]) -> None:
        """`seen`: lengths of earlier outputs."""
        self.name, self.shape, self.sources = name, shape, sources
        self.outputs = Outputs()
        for length in seen:
            self.outputs.ended(length)
        self.expected: dict[Job, Part] = {}  # their prompts are being computed
        self.waiting: list[tuple[int, Part]] = []
        self.running: list[Part] = []
        self.computed = self.preemptions = 0

    def add(self, part: Part, now: float) -> None:
        self.expected[part.job] = part

    def arrived(self, job: Job) -> None:
        if part := self.expected.pop(job, None):
            part.made = 1
            heapq.heappush(self.waiting, (part.order, part))

    def drop(self, job: Job) -> None:
        self.expected.pop(job, None)
        self.running = [part for part in self.running if part.job is not job]
        self.waiting = [entry for entry in self.waiting if entry[1].job is not job]
        heapq.heapify(self.waiting)

    def tick(self, now: float) -> None:
        for part in list(self.running):
            made = min(part.base + int((now - part.began) / self.shape.step_s), part.job.outputs)
            new, part.made = made - part.made, max(made, part.made)
            if part.made == part.job.outputs:
                self.running.remove(part)
                self.outputs.ended(part.made)
            if new > 0:
                part.job.hear(self, part, new)
        while sum(map(_held, self.running)) > self.shape.pool:
            self._preempt(max(self.running, key=lambda part: part.order))
        while self.waiting and len(self.running) < self.shape.max_running and self._fits(self.waiting[0][1]):
            part = heapq.heappop(self.waiting)[1]
            part.began, part.base = now, part.made
            self.running.append(part)
        if self.shape.by_room:
            for part in (*(part for _, part in self.waiting), *self.running):
                part.job.told(self, part, waits=part not in self.running and now > part.came + LOOK_S)

    def _preempt(self, part: Part) -> None:
        self.running.remove(part)
        self.preemptions += 1
        self.computed += _held(part)
        heapq.heappush(self.waiting, (part.order, part))

    def _fits(self, part: Part) -> bool:
        if not self.running:
            return True
        rests = [(self._rest(p, self.outputs.rest), _held(p)) for p in self.running]
        rests.append((self._rest(part, self.outputs.rest), 0))
        back = max(need(rests), len(self.running))
        return sum(map(_held, self.running)) + _held(part) + back <= self.shape.pool

    def _rest(self, part: Part, rest: Callable[[int, int], int]) -> int:
        return min(rest(part.made, part.order), self.shape.max_tokens - part.made)

    def replica(self, now: float) -> Replica:
        parts = [*self.running, *(part for _, part in self.waiting), *self.expected.values()]
        most = self.shape.max_running + self.shape.max_running // 8 + 1 if self.shape.by_room else 320
        free = 1 << 60
        if self.shape.by_room:
            sequences = [(self._rest(part, self.outputs.expected), _held(part)) for part in parts]
            free = self.shape.pool
            if parts:
                typical = min(self.outputs.mean, self.shape.max_tokens)
                free = room(free - sum(map(_held, parts)), sequences, typical)
        return Replica(
            self.name, 0, self.name, "f", capacity=most - len(parts), tokens=0, sequences=len(parts),
            sources=self.sources, held=sum(map(_held, self.running)), room=free,
            expected_output=self.outputs.mean if self.shape.by_room else 0,
        )  # fmt: skip


def _held(part: Part) -> int:
    return part.tokens + part.made


class Job:
    """A request: a flow and what generation.py does for it."""

    def __init__(self, fleet: Fleet, number: int, outputs: int) -> None:
        self.fleet, self.number, self.outputs = fleet, number, outputs
        self.arrival = fleet.now
        self.shape = shape = fleet.shape
        self.flow = Flow(fleet.timeouts, outputs, 4, None, fleet.now, shape.queue_s, wants_logprobs=False)
        self.place = fleet.admission.place(0)
        self.placed: dict[SubRequest, Prefill | Decode] = {}
        self.ticket: Ticket | None = None
        self.first_at = self.ended_at = math.inf

    @property
    def answered(self) -> bool:
        return self.flow.stage is Stage.DONE

    @property
    def ttft(self) -> float:
        return self.first_at - self.arrival

    @property
    def tpot(self) -> float:
        return (self.ended_at - self.first_at) / max(self.outputs - 1, 1)

    def enter(self) -> None:
        if self.flow.stage is Stage.QUEUED:
            flow, most = self.flow, self.shape.max_tokens
            want = PlacementRequest(
                self.shape.prompt + len(flow.outputs), most - len(flow.outputs), attempt=flow.attempt + 1
            )
            self.ticket = Ticket(self.place, want, self.serve, self.refuse, paid=flow.attempt >= 0)
            self.fleet.admission.enter(self.ticket)

    def refuse(self, error: MillraceError) -> None:
        self.perform(self.flow.cancel(error))

    def serve(self, decision: Decision) -> None:
        fleet, self.ticket = self.fleet, None
        chosen = {SubRequest.PREFILL: decision.placement.prefill, SubRequest.DECODE: decision.placement.decode}
        self.placed = {sub: fleet.workers[replica.address] for sub, replica in chosen.items() if replica is not None}
        tokens = self.shape.prompt + len(self.flow.outputs)
        self.flow.assign(frozenset(self.placed), fleet.now)
        for sub, worker in self.placed.items():
            worker.add(Part(self, self.flow.attempt, self.number, fleet.now, tokens), fleet.now)
            fleet.sent(chosen[sub], tokens, decision.situation.want.outputs)

    def hear(self, worker: Prefill | Decode, part: Part, count: int) -> None:
        """`count` more outputs of a part."""
        if part.attempt != self.flow.attempt or worker.sub not in self.flow.open:
            return
        if worker.sub is SubRequest.PREFILL:
            self.placed[SubRequest.DECODE].arrived(self)  # type: ignore[union-attr]
            first, end = self.flow.base, False
        else:
            first, end = self.flow.base + part.made - count, part.made == self.outputs
        if not self.flow.outputs:
            self.first_at = self.fleet.now
        finish = LENGTH if end else common_pb2.FINISH_REASON_UNSPECIFIED
        out = worker_pb2.SequenceOutput(first_index=first, token_ids=[7] * count, finish_reason=finish)
        self.perform(self.flow.output(worker.sub, out, self.fleet.now))

    def told(self, worker: Prefill | Decode, part: Part, *, waits: bool) -> None:
        if waits is not part.waits and part.attempt == self.flow.attempt:
            part.waits = waits
            self.flow.wait(worker.sub, not waits, self.fleet.now)

    def perform(self, actions: object) -> None:
        for action in actions:  # type: ignore[attr-defined]
            self._do(action)
        if self.flow.ended and math.isinf(self.ended_at):
            self.ended_at = self.fleet.now
            self.fleet.health.budget.end(self.fleet.now)
            if self.ticket is not None:
                self.fleet.admission.leave(self.ticket)
            self.fleet.live.pop(self, None)

    def _do(self, action: Action) -> None:
        fleet = self.fleet
        match action:
            case AbortSubRequest(sub, _, _):
                self.placed[sub].drop(self)
            case Blame(subs, reason):
                fleet.health.failed([worker.name for sub, worker in self.placed.items() if sub in subs], reason)
            case Retry(reason, delay_s, _):
                fleet.retries[reason] += 1
                fleet.later.append((fleet.now + delay_s, self))


@dataclass
class Fleet:
    shape: Shape
    seed: int = 0
    now: float = 0.0
    later: list[tuple[float, Job]] = field(default_factory=list)
    retries: Counter[Reason] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        shape = self.shape
        self.timeouts, config = Timeouts(queue=shape.queue_s), RouterConfig(model="")
        self.rng = random.Random(self.seed)
        lengths = [self._length() for _ in range(LEAST)] if shape.taught else []
        prefills = [Prefill(f"p{i:03}", shape) for i in range(shape.prefills)]
        names = frozenset(worker.name for worker in prefills)
        decodes = [Decode(f"d{i:03}", shape, names, lengths) for i in range(shape.decodes)]
        self.decodes = decodes
        workers: list[Prefill | Decode] = [*prefills, *decodes]
        self.workers = {worker.name: worker for worker in workers}
        self.replicas: dict[str, Replica] = {}
        self.chooser = Chooser(Policy.LEAST_LOADED, Policy.LEAST_LOADED, Routing())
        self.admission = Admission(1 << 20, shape.queue_s, self, lambda size: None, clock=lambda: self.now)
        self.metrics = build()
        self.health = WorkerHealth(config.resilience, self.metrics, lambda: self.now)
        decode_names = frozenset(worker.name for worker in decodes)
        roles = {**dict.fromkeys(names, "prefill"), **dict.fromkeys(decode_names, "decode")}
        self.health.keep(roles, (names, decode_names))
        self.last: dict[str, Key] = {}
        self.live: dict[Job, None] = {}
        self.jobs: list[Job] = []
        self._numbers = itertools.count()
        self._report()

    def choose(self, want: PlacementRequest) -> Decision | None:
        ejected = self.health.ejected()
        rows = [replace(r, ejected=ejected.get(r.epoch, "")) if ejected else r for r in self.replicas.values()]
        view = self._view(rows)
        decision = self.chooser.choose(Situation(view, want, dict(self.last)))
        if decision is not None and decision.placement.prefill and decision.placement.decode:
            self.last = {"prefill": decision.placement.prefill.key, "decode": decision.placement.decode.key}
        return decision

    def to_keep(self, want: PlacementRequest) -> str:
        return self._view(list(self.replicas.values())).roomiest(want)

    def pace(self) -> Pace:
        return Pace(sum(self.replicas[worker.name].sequences for worker in self.decodes), self.shape.step_s)

    def _view(self, rows: list[Replica]) -> View:
        return View(tuple(rows[: self.shape.prefills]), tuple(rows[self.shape.prefills :]))

    def sent(self, replica: Replica | None, tokens: int, outputs: int) -> None:
        assert replica is not None
        now = self.replicas[replica.address]
        expected = min(outputs, now.expected_output)
        self.replicas[replica.address] = replace(
            now, capacity=now.capacity - 1, sequences=now.sequences + 1, room=now.room - tokens - expected,
            tokens=now.tokens + (0 if now.sources else tokens), held=now.held + (tokens if now.sources else 0),
        )  # fmt: skip

    def _length(self) -> int:
        shape = self.shape
        return min(max(int(self.rng.lognormvariate(math.log(shape.output), shape.sigma)), 2), shape.max_tokens)

    def submit(self) -> None:
        """A new request."""
        shape = self.shape
        job = Job(self, next(self._numbers), self._length())
        self.jobs.append(job)
        self.health.budget.begin()
        try:
            self.admission.make_room(1, job.place, shape.prompt, None)
        except MillraceError as error:
            job.refuse(error)
            return
        self.live[job] = None
        job.enter()

    def run(self, rate: float, seconds: float) -> None:
        """`rate` requests in a second, at random, for so long."""
        until, next_at = self.now + seconds, self.now + self.rng.expovariate(rate)
        while self.now < until:
            end = self.now + TICK_S
            while next_at < end:
                self.now = next_at
                self.submit()
                next_at += self.rng.expovariate(rate)
            self.now = end
            self._tick()

    def _tick(self) -> None:
        for worker in self.workers.values():
            worker.tick(self.now)
        due = [job for at, job in self.later if at <= self.now]
        self.later = [entry for entry in self.later if entry[0] > self.now]
        for job in due:
            job.enter()
        for job in list(self.live):
            if self.now >= job.flow.expires:
                job.perform(job.flow.tick(self.now, routable=True))
        self._report()
        self.admission.pump()

    def _report(self) -> None:
        self.replicas = {name: worker.replica(self.now) for name, worker in self.workers.items()}

    @property
    def computed(self) -> int:
        """Prompt tokens so far, and tokens that were computed again."""
        return sum(worker.computed for worker in self.workers.values())

    @property
    def ejections(self) -> int:
        """So far, of healthy workers."""
        samples = self.metrics.registry.collect()
        return int(sum(s.value for m in samples for s in m.samples if s.name == "millrace_ejections_total"))
