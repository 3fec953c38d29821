"""The router's controller of duties before simulated flexible workers."""

from typing import Any

from millrace_common.split import Capacity
from millrace_router.duties.controller import BOTH, DECODE, PREFILL, FleetState, Member, decide
from millrace_router.duties.demand import RecentDemand, Report
from millrace_router.duties.lead import PERIOD_S, measured

from millrace_bench.fleet import Fleet, Job
from millrace_bench.fleet_worker import Worker

DUTIES = {PREFILL: "prefill", DECODE: "decode", BOTH: "both"}
CODES = {name: duty for duty, name in DUTIES.items()}


class Duties:
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._demand = RecentDemand(lambda: fleet.now)
        self._workers = [worker for worker in fleet.workers.values() if worker.role == "flexible"]
        self.changes: list[dict[str, Any]] = []
        fleet.on_arrival.append(self._arrived)
        fleet.on_place.append(self._demand.placed)
        fleet.after(PERIOD_S, self._tick)

    def _arrived(self, job: Job) -> None:
        request = job.request  # it ignores the end of sequence, as those of `bench pd` do
        self._demand.arrived(request.prompt, request.max_tokens, self._fleet.made_of.slo, request.outputs)

    def _tick(self) -> None:
        self._fleet.after(PERIOD_S, self._tick)
        outputs = sorted(worker.outputs.mean for worker in self._workers)
        self._demand.look({worker.name: self._report(worker) for worker in self._workers}, outputs[len(outputs) // 2])
        workload = self._demand.workload()
        times = measured([(CODES[worker.duty], worker.keys, worker.times) for worker in self._workers])
        if workload is None or times is None:
            return
        fleet, machine = self._fleet, self._workers[0].machine
        tokens = fleet.admission.tokens + sum(fleet.replicas[worker.name].tokens for worker in self._workers)
        state = FleetState(
            tuple(self._member(worker) for worker in self._workers),
            workload,
            fleet.made_of.slo,
            times,
            Capacity(machine.max_running, machine.pool, machine.chunk, machine.handover_s),
            waiting=len(fleet.admission) + sum(len(worker.prompts) for worker in self._workers),
            waiting_tokens=tokens,
            sample=self._demand.sample,
            growth=self._demand.growth,
        )
        plan = decide(state)
        changed = [worker for worker in self._workers if CODES[worker.duty] != plan.duties[worker.name]]
        for worker in changed:
            worker.duty = DUTIES[plan.duties[worker.name]]
        if changed:
            self.changes.append({"at": fleet.now, "workers": len(changed), "why": str(plan)})

    def _report(self, worker: Worker) -> Report:
        replica = self._fleet.replicas[worker.name]
        return Report(replica.sequences, replica.sequences, replica.held, worker.generated)

    def _member(self, worker: Worker) -> Member:
        return Member(worker.name, CODES[worker.duty], self._fleet.replicas[worker.name].sequences)
