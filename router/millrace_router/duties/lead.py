"""Every second: what is asked, what the workers can do, and the duties that follow. The router that leads sets them."""

import asyncio
import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from millrace.v1 import worker_pb2
from millrace_common.log import survived
from millrace_common.metrics import Metrics
from millrace_common.split import Capacity, DutySplit
from millrace_common.step_times import StepTimes
from millrace_rpc.client import reply
from millrace_rpc.enums import name_of
from millrace_rpc.errors import MillraceError

from millrace_router.config import Routing
from millrace_router.duties.controller import BOTH, DECODE, PREFILL, DutyPlan, FleetState, Member, decide, leads
from millrace_router.duties.demand import RecentDemand, Report
from millrace_router.fleet.worker import Worker
from millrace_router.policy.predict import HANDOVER_S
from millrace_router.policy.snapshot import MOST_CHUNK, Replica

log = logging.getLogger(__name__)

DUTY_OF_ROLE = {worker_pb2.ROLE_PREFILL: PREFILL, worker_pb2.ROLE_DECODE: DECODE}
PERIOD_S = 1.0
ENOUGH = 0.9  # of the requests within their limits: no explanation is due
ANSWER_S = 1.0  # of a worker that is told its duty


@dataclass
class Lead:
    router_id: str
    routing: Routing
    demand: RecentDemand
    fleet: Callable[[], Sequence[Worker]]  # the routable workers of the served model
    queued: Callable[[], tuple[int, int]]  # prompts that wait here, and their tokens
    metrics: Metrics
    leads: bool = False
    advice: str = ""  # that was logged last
    rests: bool = False  # although requests are late

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            with survived(log, "cannot decide the duties of flexible workers"):  # which would never change again
                await self.tick()

    async def tick(self) -> None:
        workers = self.fleet()
        flexible = [worker for worker in workers if worker.flexible]
        lists = [worker.load.routers for worker in flexible if worker.load is not None]
        self._look(flexible, len(set().union(*lists)))
        if not flexible:
            return
        leads_now = leads(self.router_id, lists)
        if leads_now is not self.leads:
            self.leads = leads_now
            log.info("this router %s the duties of flexible workers", "sets" if leads_now else "no longer sets")
        if leads_now:
            await self._carry_out(flexible, await self._decided(workers, flexible))

    def _look(self, flexible: Sequence[Worker], routers: int) -> None:
        found = [r.expected_output for one in flexible for r in one.replicas() if r.expected_output]
        expected = round(statistics.median(found or [0]))
        self.demand.look({worker.epoch: _report(worker) for worker in flexible}, expected, routers)
        self.metrics.duty.clear()
        for worker in flexible:
            self.metrics.duty.labels(worker.address, duty_name(worker.duty)).set(1)
        self.metrics.goodput.labels("measured").set(self.demand.goodput)

    async def _decided(self, workers: Sequence[Worker], flexible: Sequence[Worker]) -> DutyPlan | None:
        """None: nothing is asked, limited or measured, so there is nothing to decide."""
        state = self._situation(workers, flexible) if self.routing.duties != "off" else None
        if state is None:
            return None
        plan = await asyncio.to_thread(decide, state)  # takes 23 ms for 512 workers
        self.metrics.goodput.labels("expected").set(plan.now.goodput)
        self._explain_rest(state, plan)
        return plan

    def _explain_rest(self, state: FleetState, plan: DutyPlan) -> None:
        """Say once with which numbers the duties stay although requests are late."""
        rests = plan.after == plan.before and plan.now.goodput < ENOUGH * state.workload.rate
        if rests and not self.rests:
            waits = f"{state.waiting:.0f} prompts of {state.waiting_tokens:.0f} tokens wait"
            log.info("duties stay: %s; %s; %s, %s, %s", plan, plan.other, state.workload, waits, state.times)
        self.rests = rests

    def _situation(self, workers: Sequence[Worker], flexible: Sequence[Worker]) -> FleetState | None:
        workload, slo = self.demand.workload(), self.demand.slo(self.routing.slo.slo)
        replicas = [replica for worker in flexible for replica in worker.replicas()]
        times = measured([(w.duty, r.held, r.times) for w in flexible for r in w.replicas()])
        if workload is None or times is None or not slo.limited:
            return None
        waiting, tokens = self.queued()
        return FleetState(
            tuple(_member(worker) for worker in flexible),
            workload,
            slo,
            times,
            _capacity(flexible, replicas),
            fixed=_fixed(workers),
            replicas=max(len(replicas) // len(flexible), 1),
            waiting=waiting + sum(load.waiting for load in _loads(flexible)),
            waiting_tokens=tokens + sum(replica.tokens for replica in replicas),
            sample=self.demand.sample,
            growth=self.demand.growth,
        )

    async def _carry_out(self, flexible: Sequence[Worker], plan: DutyPlan | None) -> None:
        duties = {worker.address: worker.duty or BOTH for worker in flexible} if plan is None else plan.duties
        if self.routing.duties == "off":
            duties = dict.fromkeys(duties, BOTH)
        changes = [(worker, duties[worker.address]) for worker in flexible if worker.duty != duties[worker.address]]
        why = str(plan) if plan is not None else "a duty to begin with"
        if changes:
            self._explain(changes, why)
        if self.routing.duties != "advise":
            await asyncio.gather(*(self._set(worker, duty, why) for worker, duty in changes))

    def _explain(self, changes: Sequence[tuple[Worker, worker_pb2.Duty]], why: str) -> None:
        names = [f"{worker.address} {duty_name(worker.duty)} -> {duty_name(duty)}" for worker, duty in changes]
        advice = ", ".join(names)
        if self.routing.duties != "advise":
            log.info("duties change: %s; %s", advice, why)
        elif advice != self.advice:
            log.info("duties should change: %s; %s", advice, why)
            self.advice = advice

    async def _set(self, worker: Worker, duty: worker_pb2.Duty, why: str) -> None:
        before = duty_name(worker.duty)
        request = worker_pb2.SetDutyRequest(duty=duty, router_id=self.router_id, why=why)
        try:
            await reply(worker.control.SetDuty(request, timeout=ANSWER_S))
        except MillraceError as error:  # the next look tries again
            log.warning("cannot set the duty of %s: %s", worker.address, error)
        else:
            self.metrics.duty_changes.labels(before, duty_name(duty)).inc()


def duty_name(duty: worker_pb2.Duty) -> str:
    return name_of(worker_pb2.Duty, duty)


def _report(worker: Worker) -> Report:
    replicas = worker.replicas()
    generated = sum(load.counters.get("output_tokens", 0.0) for load in _loads([worker]))
    return Report(worker.in_flight, sum(r.sequences for r in replicas), sum(r.held for r in replicas), generated)


def measured(found: Iterable[tuple[worker_pb2.Duty, int, StepTimes]]) -> StepTimes | None:
    """The times of a step by those who know, each with the tokens that it holds: of prompts from replicas of duty
    prefill, of streams from those others that hold most. One that has just got its duty has seen few streams, and one
    beside whose streams all chunks are alike cannot tell what longer ones take. None: nobody has measured any.
    """
    known = [one for one in found if one[2].known]
    if not known:
        return None
    running = [(held, times) for duty, held, times in known if duty != PREFILL] or [one[1:] for one in known]
    most = max(held for held, _ in running)
    streams = _median([times for held, times in running if held >= most / 2])
    alone = [times for duty, _, times in known if duty == PREFILL]
    if not alone:
        return streams
    prompts = _median(alone)  # which never have a step without prompts
    chunk_s = max(prompts.fixed_s + prompts.chunk_s - streams.fixed_s, 0.0)
    return replace(streams, chunk_s=chunk_s, token_s=prompts.token_s, pair_s=prompts.pair_s)


def _median(times: Sequence[StepTimes]) -> StepTimes:
    """Of each part."""
    return StepTimes(*(statistics.median(getattr(one, part) for one in times) for part in StepTimes.__slots__))


def _capacity(flexible: Sequence[Worker], replicas: Sequence[Replica]) -> Capacity:
    loads = _loads(flexible)
    page_size = max(flexible[0].info.layout.page_size, 1)
    return Capacity(
        max_running=max(round(statistics.median(r.sequences + max(r.capacity, 0) for r in replicas)), 1),
        kv_tokens=max(round(statistics.median(load.pages_total for load in loads)) * page_size, 1),
        chunk_tokens=MOST_CHUNK,
        handover_s=HANDOVER_S,
    )


def _loads(workers: Iterable[Worker]) -> list[worker_pb2.ReplicaLoad]:
    return [load for worker in workers if worker.load is not None for load in worker.load.replicas]


def _member(worker: Worker) -> Member:
    loads = _loads([worker])
    page_size = worker.info.layout.page_size
    sequences = sum(load.running + load.waiting + load.importing for load in loads)
    return Member(worker.address, worker.duty, sequences, sum(load.pages_cached for load in loads) * page_size)


def _fixed(workers: Iterable[Worker]) -> DutySplit:
    numbers = {PREFILL: 0, DECODE: 0, BOTH: 0}
    for worker in workers:
        if not worker.flexible:
            numbers[DUTY_OF_ROLE.get(worker.role, BOTH)] += max(worker.info.replicas, 1)
    return DutySplit(numbers[PREFILL], numbers[DECODE], numbers[BOTH])
