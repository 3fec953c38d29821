"""The router's queue, policy, flow and health before a simulated fleet that gets more than it can serve. The clock is
simulated too.
"""

import argparse
from dataclasses import replace
from random import Random

import pytest
from millrace_bench.fleet import Fleet, Request
from millrace_bench.overload import Shape, fleet_capacity, fleet_row

# The case that was found: a pool for two to three sequences of 300 + 1,200 tokens, the router's limits as they are.
BURST = Shape(prefills=1, decodes=1, output=100_000, max_tokens=1200)


def burst(shape: Shape, requests: int, seconds: float) -> Fleet:
    rng = Random(0)
    fleet = shape.fleet(rng)
    for _ in range(requests):
        fleet.submit(shape.request(rng))
    while fleet.live and fleet.now < seconds:
        fleet.run(10.0)
    return fleet


@pytest.mark.parametrize(("decodes", "requests"), [(1, 30), pytest.param(2, 60, marks=pytest.mark.long)])
def test_of_a_burst_nothing_fails_that_a_worker_took(decodes: int, requests: int) -> None:
    """What the queue's limit does not allow is refused before any prefill. A queue without that limit answers all."""
    shape = replace(BURST, decodes=decodes)
    for queue_s, least in ((60.0, 4 * decodes), (2000.0, requests)):
        fleet = burst(replace(shape, queue_s=queue_s), requests, 1500)
        answered = [job for job in fleet.jobs if job.answered]
        refused = [job for job in fleet.jobs if not job.answered]
        assert len(answered) >= least and not fleet.live
        assert all(job.flow.attempt < 0 and job.flow.error.retry_after_s > 0 for job in refused)
        assert fleet.computed == len(answered) * shape.prompt, "no prompt twice, and none for a refused request"
        assert fleet.ejections == 0 and not fleet.retries


def rows(workers: int, seconds: float, loads: tuple[float, ...]) -> list[dict]:
    args = argparse.Namespace(workers=[4], seconds=120.0, queue=10.0, seed=0)
    each = fleet_capacity(args)
    args = argparse.Namespace(workers=[workers], seconds=seconds, queue=10.0, seed=0)
    return [fleet_row(args, workers, load, each) for load in loads]


@pytest.mark.parametrize(
    ("workers", "seconds"),
    [
        pytest.param(4, 300.0, marks=pytest.mark.long),
        pytest.param(40, 60.0, marks=pytest.mark.long),
        pytest.param(400, 20.0, marks=pytest.mark.long),
        (4, 60.0),
    ],
)
def test_goodput_at_twice_the_capacity_is_that_at_the_capacity(workers: int, seconds: float) -> None:
    at, over = rows(workers, seconds, (1.0, 2.0))
    assert over["goodput"] >= 0.95 * at["goodput"]
    for row in (at, over):
        assert row["failed"] == row["ejections"] == row["retries"] == 0
        assert row["answered"] + row["refused"] == row["ended"]
    assert over["refused"] > 0.3 * over["ended"]


def test_a_large_request_is_not_overtaken_for_ever() -> None:
    """It needs most of a pool, and small requests, which could always take the room that is free, come all the time."""
    shape, rng = Shape(prefills=1, decodes=2, taught=True, queue_s=40.0), Random(0)
    fleet = shape.fleet(rng)
    fleet.run(20.0, shape.arrivals(3.0, rng))
    large = fleet.submit(Request(3000, 1000, 1000))
    fleet.run(120.0, shape.arrivals(3.0, rng))
    assert large.answered and not fleet.retries
