"""Every second: what is asked, what the workers can do, and the duties that follow. The router that leads sets them."""

from __future__ import annotations

import asyncio
import logging
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from millrace.v1 import worker_pb2
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
from millrace_router.policy.predict import HANDOVER_S, MOST_CHUNK
from millrace_router.policy.snapshot import Replica

log = logging.getLogger(__name__)

DUTY_OF_ROLE = {worker_pb2.ROLE_PREFILL: PREFILL, worker_pb2.ROLE_DECODE: DECODE}
PERIOD_S = 1.0
ANSWER_S = 1.0  # of a worker that is told its duty


class Lead:
    def __init__(
        self,
        router_id: str,
        routing: Routing,
        demand: RecentDemand,
        fleet: Callable[[], Sequence[Worker]],
        queued_tokens: Callable[[], int],
        metrics: Metrics,
    ) -> None:
        """`fleet`: the routable workers of the served model; `queued_tokens`: of prompts that wait in this router."""
        self._router_id = router_id
        self._routing = routing
        self._demand = demand
        self._fleet = fleet
        self._queued_tokens = queued_tokens
        self._metrics = metrics
        self._leads = False
        self._advice = ""  # that was logged last

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(PERIOD_S)
            try:
                await self.tick()
            except Exception:  # garbage of a worker's, or a fault of ours: the duties would never change again
                log.exception("cannot decide the duties of flexible workers")

    async def tick(self) -> None:
        workers = self._fleet()
        flexible = [worker for worker in workers if worker.flexible]
        lists = [worker.load.routers for worker in flexible if worker.load is not None]
        self._look(flexible, len(set().union(*lists)))
        if not flexible:
            return
        leads_now = leads(self._router_id, lists)
        if leads_now is not self._leads:
            self._leads = leads_now
            log.info("this router %s the duties of flexible workers", "sets" if leads_now else "no longer sets")
        if leads_now:
            await self._carry_out(flexible, await self._decided(workers, flexible))

    def _look(self, flexible: Sequence[Worker], routers: int) -> None:
        self._demand.look({worker.epoch: _report(worker) for worker in flexible}, _expected_output(flexible), routers)
        self._metrics.duty.clear()
        for worker in flexible:
            self._metrics.duty.labels(worker.address, duty_name(worker.duty)).set(1)
        self._metrics.goodput.labels("measured").set(self._demand.goodput)

    async def _decided(self, workers: Sequence[Worker], flexible: Sequence[Worker]) -> DutyPlan | None:
        """None: nothing is asked, limited or measured, so there is nothing to decide."""
        state = self._situation(workers, flexible) if self._routing.duties != "off" else None
        if state is None:
            return None
        plan = await asyncio.to_thread(decide, state)  # takes 23 ms for 512 workers
        self._metrics.goodput.labels("expected").set(plan.now.goodput)
        return plan

    def _situation(self, workers: Sequence[Worker], flexible: Sequence[Worker]) -> FleetState | None:
        workload, slo = self._demand.workload(), self._demand.slo(self._routing.slo.slo)
        replicas = [replica for worker in flexible for replica in worker.replicas(frozenset(), "")]
        times = measured([(worker.duty, r.times) for worker in flexible for r in worker.replicas(frozenset(), "")])
        if workload is None or times is None or not slo.limited:
            return None
        waiting = self._queued_tokens() + sum(replica.tokens for replica in replicas)
        return FleetState(
            tuple(_member(worker) for worker in flexible),
            workload,
            slo,
            times,
            _capacity(flexible, replicas),
            fixed=_fixed(workers),
            replicas=max(len(replicas) // len(flexible), 1),
            waiting_tokens=waiting,
            sample=self._demand.sample,
        )

    async def _carry_out(self, flexible: Sequence[Worker], plan: DutyPlan | None) -> None:
        duties = {worker.address: worker.duty or BOTH for worker in flexible} if plan is None else plan.duties
        if self._routing.duties == "off":
            duties = dict.fromkeys(duties, BOTH)
        changes = [(worker, duties[worker.address]) for worker in flexible if worker.duty != duties[worker.address]]
        why = str(plan) if plan is not None else "a duty to begin with"
        if changes:
            self._explain(changes, why)
        if self._routing.duties != "advise":
            await asyncio.gather(*(self._set(worker, duty, why) for worker, duty in changes))

    def _explain(self, changes: Sequence[tuple[Worker, worker_pb2.Duty]], why: str) -> None:
        names = [f"{worker.address} {duty_name(worker.duty)} -> {duty_name(duty)}" for worker, duty in changes]
        advice = ", ".join(names)
        if self._routing.duties != "advise":
            log.info("duties change: %s; %s", advice, why)
        elif advice != self._advice:
            log.info("duties should change: %s; %s", advice, why)
            self._advice = advice

    async def _set(self, worker: Worker, duty: worker_pb2.Duty, why: str) -> None:
        before = duty_name(worker.duty)
        request = worker_pb2.SetDutyRequest(duty=duty, router_id=self._router_id, why=why)
        try:
            await reply(worker.control.SetDuty(request, timeout=ANSWER_S))
        except MillraceError as error:  # the next look tries again
            log.warning("cannot set the duty of %s: %s", worker.address, error)
        else:
            self._metrics.duty_changes.labels(before, duty_name(duty)).inc()


def duty_name(duty: worker_pb2.Duty) -> str:
    return name_of(worker_pb2.Duty, duty) or "unspecified"


def _report(worker: Worker) -> Report:
    replicas = worker.replicas(frozenset(), "")
    loads = worker.load.replicas if worker.load is not None else ()
    generated = sum(load.counters.get("output_tokens", 0.0) for load in loads)
    return Report(worker.in_flight, sum(r.sequences for r in replicas), sum(r.held for r in replicas), generated)


def _expected_output(workers: Iterable[Worker]) -> int:
    found = [r.expected_output for worker in workers for r in worker.replicas(frozenset(), "") if r.expected_output]
    return round(statistics.median(found)) if found else 0


def measured(found: Iterable[tuple[worker_pb2.Duty, StepTimes]]) -> StepTimes | None:
    """The times of a step by those who know: of prompts from workers of duty prefill, of streams from the others. A
    worker beside whose streams all chunks are alike cannot tell what longer ones take. None: nobody has measured any.
    """
    known = [(duty, times) for duty, times in found if times.known]
    if not known:
        return None
    streams = _median([times for duty, times in known if duty != PREFILL] or [times for _, times in known])
    alone = [times for duty, times in known if duty == PREFILL]
    if not alone:
        return streams
    prompts = _median(alone)  # which never have a step without prompts
    chunk_s = max(prompts.fixed_s + prompts.chunk_s - streams.fixed_s, 0.0)
    return replace(streams, chunk_s=chunk_s, token_s=prompts.token_s, pair_s=prompts.pair_s)


def _median(times: Sequence[StepTimes]) -> StepTimes:
    """Of each part."""
    return StepTimes(*(statistics.median(getattr(one, part) for one in times) for part in StepTimes.__slots__))


def _capacity(flexible: Sequence[Worker], replicas: Sequence[Replica]) -> Capacity:
    loads = [load for worker in flexible if worker.load is not None for load in worker.load.replicas]
    page_size = max(flexible[0].info.layout.page_size, 1)
    return Capacity(
        max_running=max(round(statistics.median(r.sequences + max(r.capacity, 0) for r in replicas)), 1),
        kv_tokens=max(round(statistics.median(load.pages_total for load in loads)) * page_size, 1),
        chunk_tokens=MOST_CHUNK,
        handover_s=HANDOVER_S,
    )


def _member(worker: Worker) -> Member:
    loads = worker.load.replicas if worker.load is not None else ()
    page_size = worker.info.layout.page_size
    sequences = sum(load.running + load.waiting + load.importing for load in loads)
    return Member(worker.address, worker.duty, sequences, sum(load.pages_cached for load in loads) * page_size)


def _fixed(workers: Iterable[Worker]) -> DutySplit:
    numbers = {PREFILL: 0, DECODE: 0, BOTH: 0}
    for worker in workers:
        if not worker.flexible:
            numbers[DUTY_OF_ROLE.get(worker.role, BOTH)] += max(worker.info.replicas, 1)
    return DutySplit(numbers[PREFILL], numbers[DECODE], numbers[BOTH])
