"""The workload of all routers, from what one sees and the workers report."""

import math
import random

import pytest
from millrace_common.split import Slo, Workload
from millrace_router.duties.demand import LEAST, MOST_GROWTH, RecentDemand, Report
from router.harness import Clock


def arrive(demand: RecentDemand, clock: Clock, requests: int, per_s: float = 10.0, tokens: int = 1000) -> None:
    for _ in range(requests):
        clock.now += 1 / per_s
        demand.arrived(tokens, 300, Slo(1.0, 0.04))
        demand.placed(400)


@pytest.fixture
def clock() -> Clock:
    return Clock(1000.0)


def test_the_rate_and_shape_of_the_last_seconds(clock: Clock) -> None:
    demand = RecentDemand(clock)
    assert demand.workload() is None and demand.slo(Slo(2.0)) == Slo(2.0) and demand.growth == 1
    arrive(demand, clock, 40)
    found = demand.workload()
    assert found is not None and found.rate == pytest.approx(10, rel=0.05)
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (1000, 300, 400)
    slo = demand.slo(Slo())
    assert (slo.ttft_s, slo.tpot_s) == (pytest.approx(1.0), pytest.approx(0.04))
    arrive(demand, clock, 400, per_s=20)
    assert demand.workload().rate == pytest.approx(20, rel=0.05) and demand.sample > 150
    clock.now += 60
    assert demand.workload() is None


@pytest.mark.parametrize(
    ("per_s", "tokens", "rate", "expected", "growth"),
    [
        (100.0, 1000, 100, 1000, MOST_GROWTH),
        (30.0, 4000, 30, 4000, 1.3),
        (5.0, 1000, 5, 1000, 1),
        (20.0, 4000, 20, 4000, 1),
        (20.0, 250, 20, 250, 1),
        (22.0, 1050, 20, 1000, 1),  # by chance: all 10 s count
    ],
)
def test_a_changed_load_counts_alone_after_3_seconds(
    clock: Clock, per_s: float, tokens: int, rate: float, expected: float, growth: float
) -> None:
    demand = RecentDemand(clock)
    arrive(demand, clock, 400, per_s=20)
    arrive(demand, clock, round(3 * per_s), per_s=per_s, tokens=tokens)
    found = demand.workload()
    assert found is not None and found.rate == pytest.approx(rate, rel=0.1)
    assert found.input_tokens == pytest.approx(expected, rel=0.05)
    assert demand.growth == pytest.approx(growth, rel=0.1)


def test_a_new_rate_is_compared_with_the_one_before_it_alone(clock: Clock) -> None:
    demand = RecentDemand(clock)
    clock.now += 0.05  # the last of the slots that count has just begun
    for requests, per_s in ((7, 1), (14, 14), (18, 9)):
        arrive(demand, clock, requests, per_s)
    assert demand.workload().rate == pytest.approx(9, rel=0.1) and demand.growth == MOST_GROWTH


def test_a_steady_rate_stays_one_sample_whatever_chance_does(clock: Clock) -> None:
    demand, rng = RecentDemand(clock), random.Random(0)
    arrive(demand, clock, 200, per_s=20)
    for _ in range(2000):
        arrive(demand, clock, 1, per_s=20 / rng.expovariate(1))
        assert demand.sample > 100


def test_outputs_are_as_long_as_workers_expect(clock: Clock) -> None:
    demand = RecentDemand(clock)
    demand.look({}, expected_output=120)
    arrive(demand, clock, 20)
    assert demand.workload().output_tokens == 120
    for least in (300,) * 20:  # as those that ignore the end of sequence
        demand.arrived(1000, 300, Slo(), least)
    assert demand.workload().output_tokens == 210


@pytest.mark.parametrize(("routers", "rate"), [(1, 10), (2, 30)])
def test_other_routers_requests_are_counted_by_their_sequences(clock: Clock, routers: int, rate: float) -> None:
    demand = RecentDemand(clock)
    for _ in range(5):
        arrive(demand, clock, 10)
        demand.look({"a": Report(own=10, sequences=30, held=0, generated=0), "b": Report(5, 15, 0, 0)}, 0, routers)
    assert demand.workload().rate == pytest.approx(rate, rel=0.05)


def test_a_leader_without_requests_reads_the_reports(clock: Clock) -> None:
    demand = RecentDemand(clock)
    arrive(demand, clock, LEAST - 1)
    assert demand.workload() is None
    for second in range(8):
        clock.now += 1
        demand.look({"a": Report(own=0, sequences=40, held=40 * 1100, generated=second * 2000)}, 200)
    assert demand.workload() == Workload(1000, 200, pytest.approx(9, rel=0.2))
    clock.now += 1
    demand.look({"b": Report(own=0, sequences=40, held=40 * 1100, generated=10.0)}, 200)  # another process
    assert demand.workload().rate < 10


def test_goodput_counts_what_is_within_both_limits(clock: Clock) -> None:
    demand = RecentDemand(clock)
    clock.now += 20
    for ttft_s, tpot_s in ((0.5, 0.03), (1.5, 0.03), (0.5, 0.05), (math.inf, math.inf)):
        demand.ended(ttft_s, tpot_s, Slo(1.0, 0.04))
    demand.ended(9.0, 9.0, Slo())
    assert 0.2 <= demand.goodput <= 0.25
