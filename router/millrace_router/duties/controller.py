"""The assignment of duties that keeps most requests within their limits. Pure.

A change has to gain more than it costs, both in requests within their limits:

    gain   what the other split answers more within `HORIZON_S`, as a mean of the measured rate and the ends of its
           error, of which a rate that grows moves the upper one; late answers count in part
    cost   the requests in time that the changing workers have and that the change puts at risk: streams that go on
           beside prompts, prompts that wait where streams begin, and prompts whose cached pages lie elsewhere then

So the error of the measured rate cannot turn the decision back and forth, and no timer is needed.
"""

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from millrace.v1 import worker_pb2
from millrace_common.split import HORIZON_S, LATE, Capacity, DutySplit, Expected, Slo, Workload, expect
from millrace_common.step_times import StepTimes

PREFILL, DECODE, BOTH = worker_pb2.DUTY_PREFILL, worker_pb2.DUTY_DECODE, worker_pb2.DUTY_BOTH
UNSPECIFIED = worker_pb2.DUTY_UNSPECIFIED
AT_RISK = 0.25  # part of a changing worker's requests that miss a limit by it
LEAST_ERROR, MOST_ERROR = 0.1, 0.3  # of the measured rate
LEAST_GAIN = 0.5  # requests: less is no reason
GOOD = 0.99  # of the most that any split answers at the measured rate: what other rates gain is no reason for less
NONE = DutySplit()
FEW = 16  # splits of many members that are looked at, besides those near the present one
DRAIN_S = 10.0  # in which waiting prompts should be computed, besides those that come


@dataclass(frozen=True, slots=True)
class Member:
    """A flexible worker."""

    address: str
    duty: worker_pb2.Duty
    sequences: int = 0  # running, waiting and importing
    cached_tokens: int = 0  # in pages that no sequence uses


@dataclass(frozen=True, slots=True)
class FleetState:
    members: tuple[Member, ...]
    workload: Workload
    slo: Slo
    times: StepTimes
    capacity: Capacity
    fixed: DutySplit = NONE  # replicas of workers with a role
    replicas: int = 1  # of each member
    waiting: float = 0.0  # prompts in queues
    waiting_tokens: float = 0.0  # of these
    sample: float = math.inf  # requests from which the rate was measured
    growth: float = 1.0  # factor by which the rate may grow until a change has its effect

    @property
    def now(self) -> DutySplit:
        duties = [member.duty for member in self.members]
        return DutySplit(duties.count(PREFILL), duties.count(DECODE), duties.count(BOTH) + duties.count(UNSPECIFIED))

    def expect(self, split: DutySplit, factor: float = 1.0) -> Expected:
        """`split` of the members, at `factor` times the measured rate, beside what waits."""
        workload, many = self.workload, self.replicas
        came = factor * workload.rate
        rate = came + self.waiting / DRAIN_S
        uncached = came * max(workload.input_tokens - workload.cached_tokens, 1.0) + self.waiting_tokens / DRAIN_S
        workload = replace(workload, rate=rate, input_tokens=workload.cached_tokens + uncached / rate)
        whole = DutySplit(split.prefill * many, split.decode * many, split.both * many).plus(self.fixed)
        return expect(whole, workload, self.slo, self.times, self.capacity)


@dataclass(frozen=True, slots=True)
class DutyPlan:
    """The duty of every member from now on."""

    duties: Mapping[str, worker_pb2.Duty]  # by address
    before: DutySplit
    after: DutySplit
    now: Expected  # as it is
    then: Expected  # with these duties
    gain: float = 0.0  # requests, over the horizon
    cost: float = 0.0  # requests
    other: str = "no other split is worth as much"  # where nothing changes: why not

    def __str__(self) -> str:
        return (
            f"{self.before} -> {self.after}: {self.now.goodput:.2f} -> {self.then.goodput:.2f} requests/s are expected "
            f"within limits, {self.gain:.1f} more in {HORIZON_S:.0f} s for {self.cost:.1f} at risk; before: "
            f"{self.now.why}, TTFT {self.now.ttft_s * 1e3:.0f} ms, TPOT {self.now.tpot_s * 1e3:.1f} ms; after: "
            f"TTFT {self.then.ttft_s * 1e3:.0f} ms, TPOT {self.then.tpot_s * 1e3:.1f} ms"
        )


def decide(state: FleetState) -> DutyPlan:
    before = state.now
    now = {rate: state.expect(before, rate) for rate in (1.0, *_errors(state))}
    found = {split: state.expect(split) for split in _candidates(before, state.fixed)}
    least = GOOD * max([now[1.0].worth, *(then.worth for then in found.values())])
    plans = (_plan(state, split, now, then) for split, then in found.items() if then.worth >= least)
    best = max(plans, key=lambda plan: plan.gain - plan.cost, default=None)
    if best is not None and best.gain > best.cost + LEAST_GAIN:
        return best
    stay = DutyPlan({m.address: m.duty or BOTH for m in state.members}, before, before, now[1.0], now[1.0])
    return stay if best is None or best.after == before else replace(stay, other=f"not {best}")


def _candidates(now: DutySplit, fixed: DutySplit) -> Iterator[DutySplit]:
    """All of both duties, and prefill beside decode; of many, near what there is and evenly over the rest."""
    total = now.total
    if not fixed.prefill:
        yield DutySplit(both=total)
    steps = {
        *range(-total, total + 1, max(total // FEW, 1)),
        *(s << i for i in range(total.bit_length()) for s in (1, -1)),
    }
    for prefill in sorted({now.prefill, *(now.prefill + step for step in steps)}):
        if (0 if fixed.prefill else 1) <= prefill <= (total if fixed.decode else total - 1):
            yield DutySplit(prefill, total - prefill)


def _plan(state: FleetState, split: DutySplit, now: Mapping[float, Expected], then: Expected) -> DutyPlan:
    """`now`: what the present split makes of each factor of the measured rate; `then`: `split` of the measured one."""
    after = (then if rate == 1 else state.expect(split, rate) for rate in now)
    more = statistics.fmean(a.worth - b.worth for a, b in zip(after, now.values(), strict=True))
    duties = assign(state, split)
    in_time = min(max(now[1.0].goodput / max(now[1.0].served, 1e-9), LATE), 1.0)  # late ones count in part here too
    cost = in_time * sum(_cost(state, member, duties[member.address]) for member in state.members)
    return DutyPlan(duties, state.now, split, now[1.0], then, more * HORIZON_S, cost)


def _errors(state: FleetState) -> tuple[float, float]:
    """Factors of the measured rate between which the true one lies until a change has its effect."""
    error = min(max(1 / math.sqrt(max(state.sample, 1.0)), LEAST_ERROR), MOST_ERROR)
    return 1 - error, max(1 + error, state.growth)


def assign(state: FleetState, split: DutySplit) -> dict[str, worker_pb2.Duty]:
    """Give the duties to the members for which that costs least, by address."""
    found: dict[str, worker_pb2.Duty] = {}
    for duty, number in ((PREFILL, split.prefill), (DECODE, split.decode), (BOTH, split.both)):

        def order(member: Member, duty: worker_pb2.Duty = duty) -> tuple[float, bool, float, str]:
            other = DECODE if member.duty == PREFILL else PREFILL
            kept = _cost(state, member, other)  # by keeping what it has
            return _cost(state, member, duty), member.duty != duty, -kept, member.address

        left = (member for member in state.members if member.address not in found)
        found.update((member.address, duty) for member in sorted(left, key=order)[:number])
    return found


def _cost(state: FleetState, member: Member, duty: worker_pb2.Duty) -> float:
    """Requests at risk when the member gets this duty. Decode and both differ only in what comes next."""
    if member.duty == UNSPECIFIED or (member.duty == PREFILL) == (duty == PREFILL):
        return 0.0
    at_risk = AT_RISK * member.sequences
    if duty == PREFILL:
        return at_risk
    workload = state.workload
    hit = min(workload.cached_tokens / max(workload.input_tokens, 1.0), 1.0)
    return at_risk + AT_RISK * hit * member.cached_tokens / max(workload.input_tokens, 1.0)


def leads(router_id: str, lists: Iterable[Iterable[str]]) -> bool:
    """Whether this router is the first of those that the workers list. A router that dies disappears from the lists."""
    return router_id == min((router for routers in lists for router in routers), default="")
