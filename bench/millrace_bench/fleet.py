"""A fleet of simulated workers (fleet_worker.py) on a simulated clock, under the router's own queue, policy, flow and
health. Nothing happens between two events, so hundreds of workers take minutes of a core.

A worker reports its load every REPORT_S, and the router counts what it sent since. The tokens of a stream are told at
times; the moments of the first and the last one are exact.
"""

import heapq
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from millrace.v1 import common_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_common.split import Slo
from millrace_router.config import Policy, RouterConfig, Routing, Timeouts
from millrace_router.flow.flow import AbortSubRequest, Action, Blame, Flow, Retry, Stage, SubRequest
from millrace_router.flow.metrics import build
from millrace_router.health.workers import WorkerHealth
from millrace_router.policy.choose import NO_PAGES, Chooser, Decision, Situation
from millrace_router.policy.holders import Process
from millrace_router.policy.snapshot import NO_LIMITS, Key, Pace, PlacementRequest, Replica, View
from millrace_router.queue.admission import Admission
from millrace_router.queue.fair_queue import Ticket
from millrace_rpc.errors import MillraceError

from millrace_bench.fleet_worker import PAGE, Machine, Part, Worker

REPORT_S, LOOK_S, TELL_S = 0.05, 0.1, 1.0
LENGTH = common_pb2.FINISH_REASON_LENGTH
GENERATES = ("decode", "both", "unified")  # duties


@dataclass(frozen=True, slots=True)
class Request:
    prompt: int  # tokens
    outputs: int
    max_tokens: int
    load: str = ""  # its name
    session: str = ""  # the conversation, whose cached tokens count; empty: none
    answered: "Callable[[Job], None] | None" = None


class Job:
    """A request: a flow and what generation.py does for it."""

    def __init__(self, fleet: "Fleet", number: int, request: Request) -> None:
        self.fleet, self.number, self.request = fleet, number, request
        self.arrival = fleet.now
        self.flow = Flow(
            fleet.timeouts, request.outputs, 4, None, fleet.now, fleet.timeouts.queue, wants_logprobs=False
        )
        self.place = fleet.admission.place(0)
        self.placed: dict[SubRequest, Worker] = {}
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
        return (self.ended_at - self.first_at) / max(self.request.outputs - 1, 1)

    def enter(self) -> None:
        if self.flow.stage is Stage.QUEUED:
            flow, request, slo = self.flow, self.request, self.fleet.made_of.slo
            tokens, left = request.prompt + len(flow.outputs), request.max_tokens - len(flow.outputs)
            want = PlacementRequest(
                tokens, left, slo=slo, session=request.session, page_size=PAGE, attempt=flow.attempt + 1
            )
            late_at = self.arrival + slo.ttft_s / 2
            self.ticket = Ticket(self.place, want, self.serve, self.refuse, flow.attempt >= 0, late_at)
            self.fleet.admission.enter(self.ticket)

    def refuse(self, error: MillraceError) -> None:
        self.perform(self.flow.cancel(error))

    def serve(self, decision: Decision) -> None:
        fleet, self.ticket = self.fleet, None
        chosen = {SubRequest.PREFILL: decision.placement.prefill, SubRequest.DECODE: decision.placement.decode}
        self.placed = {sub: fleet.workers[replica.address] for sub, replica in chosen.items() if replica is not None}
        tokens, cached = self.request.prompt + len(self.flow.outputs), decision.cached_tokens
        self.flow.assign(frozenset(self.placed), fleet.now)
        for note in fleet.on_place:
            note(cached)
        goal = self.request.outputs - len(self.flow.outputs)
        pair = len(self.placed) == 2
        for sub, worker in self.placed.items():
            part = Part(self, sub, self.flow.attempt, self.number, fleet.now, tokens, goal)
            fleet.sent(worker.name, tokens, tokens - cached, decision.situation.want.outputs, sub, pair)
            if pair and sub is SubRequest.DECODE:
                worker.expect(part)
            else:
                worker.add(part, cached, 0.0 if decision.prefix_fetch is None else decision.prefix_fetch.fetch_s)

    def prefilled(self, worker: Worker, part: Part) -> None:
        """The prompt is computed, and its KV goes to the worker that generates."""
        self.note_cached(worker, part.tokens)
        self.hear(worker, part, 1)
        if (other := self.placed.get(SubRequest.DECODE)) is not None:
            self.fleet.after(worker.machine.handover_s, lambda: other.arrived(self))

    def note_cached(self, worker: Worker, tokens: int) -> None:
        if self.request.session:
            self.fleet.cached[self.request.session][worker.name, 0] = tokens // PAGE

    def hear(self, worker: Worker, part: Part, made: int) -> None:
        """A part has made so many outputs."""
        count = made - part.heard
        if count <= 0 or part.attempt != self.flow.attempt or part.sub not in self.flow.open:
            return
        first, part.heard = self.flow.base + part.heard, made
        if not self.flow.outputs:
            self.first_at = self.fleet.now
        end = (part.sub is SubRequest.DECODE and made >= part.goal) or (len(self.placed) == 1 and part.goal == 1)
        finish = LENGTH if end else common_pb2.FINISH_REASON_UNSPECIFIED
        out = worker_pb2.SequenceOutput(first_index=first, token_ids=[7] * count, finish_reason=finish)
        if end:
            self.note_cached(worker, part.tokens + made)
        self.perform(self.flow.output(part.sub, out, self.fleet.now))

    def told(self, worker: Worker, part: Part, *, waits: bool) -> None:
        if waits is not part.waits and part.attempt == self.flow.attempt:
            part.waits = waits
            self.flow.wait(part.sub, not waits, self.fleet.now)

    def perform(self, actions: Iterable[Action]) -> None:
        for action in actions:
            self._do(action)
        if self.flow.ended and math.isinf(self.ended_at):
            self.ended_at = self.fleet.now
            self.fleet.health.budget.end(self.fleet.now)
            if self.ticket is not None:
                self.fleet.admission.leave(self.ticket)
            self.fleet.live.pop(self, None)
            if self.answered and self.request.answered is not None:
                self.request.answered(self)

    def _do(self, action: Action) -> None:
        fleet = self.fleet
        match action:
            case AbortSubRequest(sub, _, _):
                self.placed[sub].drop(self)
            case Blame(subs, reason):
                fleet.health.failed([worker.name for sub, worker in self.placed.items() if sub in subs], reason)
            case Retry(reason, delay_s, _):
                fleet.retries[reason] += 1
                fleet.after(delay_s, self.enter)


@dataclass(frozen=True, slots=True)
class Fleets:
    """What a fleet is made of. slo: of all requests; with limits, they are placed by predicted times."""

    workers: Mapping[str, int]  # by role
    machines: Mapping[str, Machine]  # by role
    queue_s: float = 60.0  # timeouts.queue
    policy: Policy = Policy.LEAST_LOADED
    routing: Routing = field(default_factory=Routing)
    slo: Slo = NO_LIMITS
    seen: tuple[int, ...] = ()  # lengths of outputs that workers have seen before


class Fleet:
    def __init__(self, made_of: Fleets) -> None:
        self.now, self.made_of = 0.0, made_of
        self.retries: Counter[Reason] = Counter()
        self.timeouts, config = Timeouts(queue=made_of.queue_s), RouterConfig(model="")
        names = [(f"{role[0]}{i:03}", role) for role, count in made_of.workers.items() for i in range(count)]
        self.sources = frozenset(name for name, role in names if role in ("prefill", "flexible"))
        made = [Worker(self, name, role, made_of.machines[role], made_of.seen) for name, role in sorted(names)]
        self.workers = {worker.name: worker for worker in made}
        self.replicas: dict[str, Replica] = {}
        self.chooser = Chooser(made_of.policy, made_of.policy, made_of.routing)
        self.admission = Admission(1 << 20, made_of.queue_s, self, lambda size: None, clock=lambda: self.now)
        self.metrics = build()
        self.health = WorkerHealth(config.resilience, self.metrics, lambda: self.now)
        by_role = [frozenset(name for name, its in names if its == role) for role in made_of.workers]
        self.health.keep(dict(names), by_role)
        self.last: dict[str, Key] = {}
        self.cached: defaultdict[str, dict[Process, int]] = defaultdict(dict)  # pages of conversations
        self.on_arrival: list[Callable[[Job], None]] = []
        self.on_place: list[Callable[[int], None]] = []  # with the tokens that are cached
        self.live: dict[Job, None] = {}
        self.jobs: list[Job] = []
        self._numbers, self._ties = itertools.count(), itertools.count()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._ticks = 0
        self._report()
        self.after(REPORT_S, self._tick)

    # ------------------------------------------------------------------------------------- what admission asks

    def choose(self, want: PlacementRequest) -> Decision | None:
        pages = self.cached[want.session] if want.session else NO_PAGES
        decision = self.chooser.choose(Situation(self.view(), want, dict(self.last), pages, pages, pages))
        if decision is not None:
            prefill, decode = decision.placement.prefill, decision.placement.decode
            if prefill is not None:
                self.last["prefill"] = prefill.key
            if decode is not None:
                self.last["whole" if prefill is None else "decode"] = decode.key
        return decision

    def to_keep(self, want: PlacementRequest) -> str:
        return self.view().roomiest(want)

    def pace(self) -> Pace:
        generating = [worker for worker in self.workers.values() if worker.duty in GENERATES]
        step_s = min((worker.machine.times.fixed_s for worker in generating), default=0.0)
        return Pace(sum(self.replicas[worker.name].sequences for worker in generating), step_s)

    def view(self) -> View:
        rows: dict[str, list[Replica]] = {"prefill": [], "decode": [], "unified": []}
        for name, replica in self.replicas.items():
            duty = self.workers[name].duty
            rows["unified" if duty == "both" else duty].append(replica)
        prefill, decode, unified = map(self.health.marked, rows.values())
        return View(prefill, decode, unified)

    def sent(self, name: str, tokens: int, uncached: int, outputs: int, sub: SubRequest, pair: bool) -> None:
        """What the worker will not have said in its latest report."""
        now = self.replicas[name]
        computes, generates = sub is SubRequest.PREFILL or not pair, sub is SubRequest.DECODE
        self.replicas[name] = replace(
            now, capacity=now.capacity - 1, sequences=now.sequences + 1,
            room=now.room - tokens - min(outputs, now.expected_output),
            tokens=now.tokens + uncached * computes, held=now.held + tokens * generates,
            streams=now.streams + (self.workers[name].duty != "prefill"),
        )  # fmt: skip

    # ------------------------------------------------------------------------------------- time

    def after(self, seconds: float, do: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._ties), do))

    def submit(self, request: Request) -> Job:
        job = Job(self, next(self._numbers), request)
        self.jobs.append(job)
        for note in self.on_arrival:
            note(job)
        self.health.budget.begin()
        try:
            self.admission.make_room(1, job.place, request.prompt, None)
        except MillraceError as error:
            job.refuse(error)
            return job
        self.live[job] = None
        job.enter()
        return job

    def run(self, seconds: float, arrivals: Iterable[tuple[float, Request]] = ()) -> None:
        """For so long. Arrivals: seconds after the one before, and the request."""
        until, coming = self.now + seconds, iter(arrivals)

        def next_one() -> None:
            if (arrival := next(coming, None)) is not None:
                self.after(arrival[0], lambda: come(arrival[1]))

        def come(request: Request) -> None:
            if self.now < until:
                self.submit(request)
                next_one()

        next_one()
        while self._events[0][0] <= until:
            self.now, _, do = heapq.heappop(self._events)
            do()
        self.now = until

    def _tick(self) -> None:
        self._ticks += 1
        self.after(REPORT_S, self._tick)
        if self._ticks % round(TELL_S / REPORT_S) == 0:
            for worker in self.workers.values():
                worker.tell(self.now)
        if self._ticks % round(LOOK_S / REPORT_S) == 0:
            for job in [job for job in self.live if self.now >= job.flow.expires]:
                job.perform(job.flow.tick(self.now, routable=True))
        self._report()
        self.admission.pump()

    def _report(self) -> None:
        self.replicas = {name: worker.replica() for name, worker in self.workers.items()}

    @property
    def computed(self) -> int:
        """Prompt tokens so far, and tokens that were computed again."""
        return sum(worker.computed for worker in self.workers.values())

    @property
    def ejections(self) -> int:
        """So far, of healthy workers."""
        samples = self.metrics.registry.collect()
        return int(sum(s.value for m in samples for s in m.samples if s.name == "millrace_ejections_total"))
