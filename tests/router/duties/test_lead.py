"""The router that leads tells workers their duties, and one that does not says nothing."""

import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

import pytest
from millrace.v1 import worker_pb2
from millrace_common.split import Slo
from millrace_common.step_times import StepTimes
from millrace_router.duties import lead
from millrace_router.duties.controller import BOTH, DECODE, PREFILL, UNSPECIFIED
from millrace_router.duties.lead import measured
from millrace_router.main import Router
from router.fake_worker import FLEXIBLE, FakeWorker
from router.harness import Clock, Cluster

TIMES = worker_pb2.StepTimes(fixed_s=0.018, sequence_s=1e-4, key_s=2e-8, chunk_s=0.008, token_s=4.4e-5, pair_s=1e-9)
LIMITS = {"ttft": 1.0, "tpot": 0.04}


@pytest.fixture(autouse=True)
def ticks_are_the_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lead, "PERIOD_S", 3600.0)


async def fleet(cluster: Callable, number: int = 4, **routing: object) -> Cluster:
    workers = [FakeWorker(FLEXIBLE, capacity=256) for _ in range(number)]
    for worker in workers:
        worker.counts = {"step_times": TIMES, "pages_total": 10_000}
    made: Cluster = await cluster(*workers, routing={"slo": LIMITS, **routing}, timeouts={"silence": 30.0})
    mine = [made.router.registry.router_id]  # until workers name it, nobody leads
    await made.until(lambda: all(list(w.load.routers) == mine for w in made.router.registry.serving()))
    return made


def ask(router: Router, rate: float, tokens: int = 4096, outputs: int = 256, slo: Slo = Slo(1.0, 0.04)) -> None:
    """So many requests came in the last ten seconds."""
    demand, clock = router._lead.demand, Clock(1000.0)
    demand._clock, demand._began = clock, clock.now
    for _ in range(round(10 * rate)):
        clock.now += 1 / rate
        demand.arrived(tokens, outputs, slo)


async def tick(made: Cluster, *routers: Router) -> list[int]:
    workers = made.router.registry.workers
    for router in routers or (made.router,):
        await router._lead.tick()
        await made.until(lambda: all(workers[fake.address].load.duty == fake.duty for fake in made.workers))
    return sorted(worker.duty for worker in made.workers)


@contextlib.asynccontextmanager
async def another(made: Cluster) -> AsyncIterator[Router]:
    """A second router of the same workers."""
    router = Router(made.router.config)
    await router.start()
    try:
        await made.until(lambda: all(len(worker.linked) == 2 for worker in made.workers))
        both = {made.router.registry.router_id, router.registry.router_id}
        for one in (made.router, router):
            await made.until(lambda one=one: all(set(w.load.routers) == both for w in one.registry.serving()))
            await made.until(lambda one=one: len(one.registry.serving()) == len(made.workers))
        yield router
    finally:
        await router.stop()


async def test_duties_follow_what_is_asked(cluster: Callable, caplog: pytest.LogCaptureFixture) -> None:
    made = await fleet(cluster)
    caplog.set_level(logging.INFO, "millrace_router.duties.lead")
    assert await tick(made) == [BOTH] * 4
    ask(made.router, 7.0)
    assert await tick(made) == [PREFILL] * 3 + [DECODE]
    assert "4 both -> 3 prefill + 1 decode" in caplog.text
    assert made.metric("millrace_duty_changes_total", before="both", after="prefill") == 3
    first = made.workers[0]
    request = first.duties[-1]
    assert request.router_id == made.router.registry.router_id and "requests/s" in request.why
    await tick(made)
    assert sum(made.metric("millrace_duty", worker=first.address, duty=name) for name in ("prefill", "decode")) == 1
    assert made.metric("millrace_goodput_requests_per_second", kind="expected") == pytest.approx(7.0, rel=0.05)
    told = [len(worker.duties) for worker in made.workers]
    await tick(made)
    assert [len(worker.duties) for worker in made.workers] == told, "what does not change is not said again"


async def test_a_worker_that_starts_again_gets_a_duty(cluster: Callable) -> None:
    made = await fleet(cluster)
    ask(made.router, 7.0)
    assert await tick(made) == [PREFILL] * 3 + [DECODE]
    lost = next(worker for worker in made.workers if worker.duty == PREFILL)
    lost.duty = UNSPECIFIED
    await lost.restart()
    registry = made.router.registry
    await made.until(lambda: lost.epoch in {worker.epoch for worker in registry.serving()})
    assert await tick(made) == [PREFILL] * 3 + [DECODE]


async def test_advice_changes_nothing(cluster: Callable, caplog: pytest.LogCaptureFixture) -> None:
    made = await fleet(cluster, duties="advise")
    caplog.set_level(logging.INFO, "millrace_router.duties.lead")
    ask(made.router, 7.0)
    for _ in range(3):
        assert await tick(made) == [UNSPECIFIED] * 4
    assert not any(worker.duties for worker in made.workers)
    assert caplog.text.count("4 both -> 3 prefill + 1 decode") == 1
    assert made.metric("millrace_goodput_requests_per_second", kind="expected") > 0


async def test_what_changes_nothing_although_requests_are_late_is_said_once(
    cluster: Callable, caplog: pytest.LogCaptureFixture
) -> None:
    made = await fleet(cluster)
    caplog.set_level(logging.INFO, "millrace_router.duties.lead")
    for rate, times in ((7.0, 0), (90.0, 1), (90.0, 1), (7.0, 1), (90.0, 2)):
        ask(made.router, rate)
        await tick(made)
        await tick(made)
        assert caplog.text.count("duties stay: 3 prefill + 1 decode -> 3 prefill + 1 decode: ") == times
    assert "no other split is worth as much; Workload(" in caplog.text and "rate=90.0" in caplog.text
    assert "0 prompts of 0 tokens wait" in caplog.text and "fixed_s=0.018" in caplog.text


async def test_off_is_both(cluster: Callable) -> None:
    made = await fleet(cluster, duties="off")
    made.workers[0].change(duty=PREFILL)
    await made.settled()
    ask(made.router, 7.0)
    assert await tick(made) == [BOTH] * 4


async def test_without_limits_nothing_is_decided(cluster: Callable) -> None:
    made = await fleet(cluster, slo={})
    ask(made.router, 7.0, slo=Slo())
    assert await tick(made) == [BOTH] * 4


async def test_two_routers_agree_and_the_next_one_takes_over(cluster: Callable) -> None:
    made = await fleet(cluster)
    async with another(made) as other:
        first, second = sorted((made.router, other), key=lambda router: router.registry.router_id)
        for router in (first, second):
            ask(router, 7.0)
        assert await tick(made, second, first, second) == [PREFILL] * 3 + [DECODE]
        assert {request.router_id for w in made.workers for request in w.duties} == {first.registry.router_id}
    mine = [made.router.registry.router_id]
    await made.until(lambda: all(list(w.load.routers) == mine for w in made.router.registry.serving()))
    ask(made.router, 9.0, tokens=256, outputs=1024)
    assert (await tick(made))[-1] != PREFILL, "whoever led before"
    assert made.router._lead.leads


async def test_a_worker_that_does_not_answer_is_told_again(cluster: Callable, caplog: pytest.LogCaptureFixture) -> None:
    made = await fleet(cluster)
    deaf = made.workers[0]
    deaf.duty_failures.append("INTERNAL")
    await made.router._lead.tick()
    assert "cannot set the duty of" in caplog.text and deaf.duty == UNSPECIFIED
    await tick(made)
    assert deaf.duty == BOTH


def test_times_of_prompts_come_from_those_who_compute_many() -> None:
    """Workers of duty decode may know little of prompts; one of duty prefill knows no step without any."""
    streams = StepTimes(fixed_s=0.02, sequence_s=1e-4, key_s=1e-8, chunk_s=0.03, token_s=1e-6)
    prompts = StepTimes(fixed_s=0.0, chunk_s=0.03, token_s=5e-5, pair_s=2e-9)
    found = measured([*[(DECODE, 90_000, streams)] * 2, (PREFILL, 0, prompts)])
    assert found == replace(streams, chunk_s=pytest.approx(0.01), token_s=5e-5, pair_s=2e-9)
    new = replace(streams, fixed_s=0.01, sequence_s=1e-3)
    assert measured([(DECODE, 90_000, streams), *[(DECODE, 4000, new)] * 2]) == streams, "who has just begun to decode"
    assert measured([(BOTH, 0, streams), (BOTH, 0, StepTimes())]) == streams
    assert measured([(PREFILL, 0, prompts)]) == replace(prompts, chunk_s=pytest.approx(0.03))
    assert measured([(BOTH, 0, StepTimes())]) is None
