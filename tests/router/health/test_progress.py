"""Streams of a decode worker that makes no progress, whatever it says of itself."""

import asyncio
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.v1 import common_pb2, worker_pb2
from millrace_common import pace
from millrace_common.pace import FEW, LEAST_S, TICK_S, TIMES
from millrace_router.health.progress import WorkerProgress
from router.fake_worker import DECODE, PREFILL, Behaviour, FakeWorker, Outputs, behaviour, expected, output, waits
from router.fleet.test_workers import detail

LENGTH = common_pb2.FINISH_REASON_LENGTH
CEILING_S = 30.0
BEFORE = 15  # tokens


def noted_looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When workers' progress is looked at from now on."""
    looks, look = list[float](), WorkerProgress.look

    def noted(self: WorkerProgress, streams: bool, now: float, starved: float = 0.0) -> str:
        looks.append(now)
        return look(self, streams, now, starved)

    monkeypatch.setattr(WorkerProgress, "look", noted)
    return looks


def steps(progress: WorkerProgress, gap_s: float, count: int, now: float = 0.0) -> float:
    """Outputs at this pace, looked at all the time; the time after them."""
    for _ in range(count):
        now = silence(progress, now, gap_s)
        progress.moved(now)
    return now


def silence(progress: WorkerProgress, now: float, seconds: float) -> float:
    end = now + seconds
    while now < end:
        assert progress.look(True, now) == ""
        now += min(TICK_S, end - now + 1e-9)
    return now


@given(st.floats(0.001, 3.0), st.floats(0.1, 0.99), st.integers(FEW + 2, 40))
def test_a_worker_is_lost_beyond_its_pace_and_not_before(gap_s: float, part: float, count: int) -> None:
    progress = WorkerProgress(CEILING_S, 0.0)
    now = steps(progress, gap_s, count)
    limit_s = min(max(LEAST_S, TIMES * gap_s), CEILING_S)
    silence(progress, now, limit_s * part)
    assert progress.look(True, now + 1.01 * limit_s + 1e-6).startswith("no progress for ")


def test_a_worker_whose_pace_is_not_known_has_the_ceiling() -> None:
    progress = WorkerProgress(CEILING_S, 0.0)
    now = steps(progress, 0.02, 3)
    silence(progress, now, CEILING_S)
    assert progress.look(True, now + CEILING_S + 0.1)


@given(st.floats(0.0, 0.9), st.floats(0.001, 3.0), st.floats(0.1, 0.99))
def test_what_a_worker_is_starved_is_no_silence(starved: float, gap_s: float, part: float) -> None:
    progress = WorkerProgress(CEILING_S, 0.0)
    now = steps(progress, gap_s, 20)
    limit_s = min(max(LEAST_S, TIMES * gap_s), CEILING_S)
    assert progress.look(True, now, starved) == ""
    progress.moved(now)
    assert progress.look(True, now + part * limit_s / (1 - starved), starved) == ""
    assert progress.look(True, now + 1.01 * limit_s / (1 - starved), starved).startswith("no progress for ")


def test_a_worker_without_streams_owes_nothing() -> None:
    """And the time without them is no gap."""
    progress = WorkerProgress(CEILING_S, 0.0)
    now = steps(progress, 0.02, 20)
    for _ in range(3):
        assert progress.look(False, now) == ""
        now += 100.0
        assert progress.look(False, now) == progress.look(True, now) == ""
        now = steps(progress, 0.02, 5, now)
    assert progress.look(True, now + LEAST_S + 0.01)


@behaviour
async def runs(
    worker: FakeWorker,
    request: worker_pb2.EngineRequest,
    gap_s: float,
    until: Callable[[int], bool] = lambda index: False,
) -> Outputs:
    """A token every `gap_s`, and none any more from the one on for which `until` is true."""
    for index in range(request.num_prior_outputs, request.sampling.max_tokens):
        await asyncio.sleep(gap_s)
        if until(index):
            await asyncio.Event().wait()
        yield output(request, index, finish=LENGTH if index + 1 == request.sampling.max_tokens else 0)


async def test_streams_leave_a_worker_that_is_stuck(cluster: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "LEAST_S", 0.3)
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), FakeWorker(DECODE))
    stuck: list[FakeWorker] = []

    def give_up(worker: FakeWorker) -> Behaviour:
        def at(index: int) -> bool:
            if index == BEFORE and not stuck:
                stuck.append(worker)
            return worker in stuck

        return runs(0.02, at)

    for worker in made.decodes:
        worker.change(counts={"running": 1})  # the same for ever
        worker.script.extend([give_up(worker)] * 2)
    result = await made.generate([1], sampling={"max_tokens": 2 * BEFORE})
    assert result.tokens() == expected([1], 2 * BEFORE)
    assert made.metric("millrace_retries_total", reason="WORKER_LOST") == 1
    (victim,) = stuck
    await made.until(lambda: detail(made, victim).startswith("stuck"))
    victim.change(counts={"running": 0})
    await made.until(lambda: all(status.routable for status in made.router.registry.status()))


async def test_a_worker_whose_numbers_move_may_let_streams_wait(
    cluster: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For pages, for example: others have them."""
    monkeypatch.setattr(pace, "LEAST_S", 0.3)
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE))
    (worker,) = made.decodes
    go_on, looks = asyncio.Event(), noted_looks(monkeypatch)
    worker.script.append(waits(go_on, after=BEFORE))
    task = asyncio.create_task(made.generate([1], sampling={"max_tokens": 2 * BEFORE}))
    await made.until(lambda: bool(worker.active))
    rises, seen = itertools.count(1), len(looks)

    def rose() -> bool:
        worker.change(counts={"counters": {"steps": next(rises)}})
        return len(looks) > seen and looks[-1] - looks[seen] > 3 * pace.LEAST_S

    await made.until(rose)
    go_on.set()
    assert (await task).tokens() == expected([1], 2 * BEFORE)
    assert [request.id.attempt for request in worker.submitted] == [0]
