"""Parts of the frontend by themselves: a drain, the end, links, admission, what metrics say."""

import asyncio
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from millrace.v1 import decode_pb2, worker_pb2
from millrace_common.metrics import WORKER, Metrics
from millrace_common.reasons import Reason
from millrace_common.spans import OFF
from millrace_rpc.errors import MillraceError
from millrace_serve.engine.core import Abort, Failure, RequestId, Route, SequenceOutput, Submit, TokenOutput
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_serve.worker.frontend.lifecycle import Lifecycle, State
from millrace_serve.worker.frontend.links import Links, RouterLink
from millrace_serve.worker.frontend.requests import ABORTED, ORPHANED, Requests
from millrace_serve.worker.frontend.spans import WorkerSpans
from millrace_serve.worker.frontend.wakeup import Wakeup, together
from millrace_testing import HANG_S
from prometheus_client import CollectorRegistry


@pytest.fixture
def metrics() -> Metrics:
    return Metrics(WORKER, CollectorRegistry())


def at(state: State) -> Lifecycle:
    life = Lifecycle(lambda state: None)
    life.advance(state, "")
    return life


def test_state_gauge_falls_when_the_next_state_comes(metrics: Metrics) -> None:
    frontend: Any = SimpleNamespace(metrics=metrics, board=Mock(), state_changed=Mock())
    for state in (State.READY, State.PAUSED, State.DRAINING):
        Frontend._on_state(frontend, state)
        samples = metrics.state.collect()[0].samples
        assert [sample.labels["state"] for sample in samples if sample.value] == [state]
    assert frontend.board.changed.fire.call_count == frontend.state_changed.call_count == 3


def test_version_shown_is_the_newest_alone(metrics: Metrics) -> None:
    frontend: Any = SimpleNamespace(metrics=metrics)
    for version in ("one", "two"):
        frontend.weights_version = version
        Frontend.show_version(frontend)
        [sample] = metrics.weights.collect()[0].samples
        assert sample.labels["version"] == version and sample.value == 1


@pytest.mark.parametrize(("lost", "reason"), [(True, Reason.WORKER_LOST), (False, Reason.DRAINING)])
async def test_close_ends_links_with_the_reason_of_the_end(lost: bool, reason: Reason) -> None:
    future = asyncio.get_running_loop().create_future()
    if lost:
        future.set_result("rank 1 ended")
    frontend: Any = Mock(lifecycle=at(State.READY), lost=future, role=AsyncMock(), ranks=AsyncMock())
    await Frontend.close(frontend, "over")
    [[error], _] = frontend.links.end_all.call_args
    assert (error.reason, error.message, frontend.lifecycle.state) == (reason, "over", State.STOPPED)
    frontend.ranks.stop.assert_awaited_once()


async def test_drain_waits_for_transfers_as_long_as_a_lease() -> None:
    """Its own time is over when the last request has failed; pages may still be read."""
    looks = iter([True, True, False])
    changed = SimpleNamespace(wait=AsyncMock())
    frontend: Any = SimpleNamespace(
        lifecycle=at(State.READY), requests=[], board=SimpleNamespace(idle=True, changed=changed),
        config=SimpleNamespace(timeouts=SimpleNamespace(lease=100.0)),
    )  # fmt: skip
    frontend.role = type("Role", (), {"busy": property(lambda self: next(looks))})()
    assert await Frontend.drain(frontend, 0.0) == 0
    assert changed.wait.await_count == 2 and next(looks, None) is None


async def test_lost_rank_ends_the_process_whatever_else_fails() -> None:
    lost = asyncio.get_running_loop().create_future()
    with pytest.raises(KeyError):
        Frontend._on_lost(Mock(lost=lost, requests=Mock(fail_all=Mock(side_effect=KeyError))), "rank 1 ended")
    assert lost.result() == "rank 1 ended"


# ------------------------------------------------------------------------------------------------ requests


class Bench:
    """Requests of a worker that is READY, over an engine that only listens."""

    def __init__(self, metrics: Metrics) -> None:
        self.engine: list[Any] = []
        self.readers: list[tuple[RequestId, Failure]] = []
        ranks: Any = SimpleNamespace(send=lambda replica, message: self.engine.append(message))
        self.requests = Requests(WorkerConfig(engine="sim"), at(State.READY), ranks, WorkerSpans(OFF), metrics)
        self.requests.on_abort = lambda id, why: bool(self.readers.append((id, why)))

    def submit(self, room: int, owner: RouterLink, token_ids: tuple[int, ...] = (5, 6)) -> RequestId:
        wire = worker_pb2.EngineRequest(id={"room": room}, token_ids=token_ids, sampling={"max_tokens": 4})
        request = self.requests.submit(wire, Route.LOCAL, owner)
        assert request is not None and self.engine[-1] == Submit(request)
        return request.id


@pytest.fixture
async def bench(metrics: Metrics) -> Bench:
    return Bench(metrics)


async def test_link_that_closes_orphans_its_own_requests_only(bench: Bench) -> None:
    """Readers of their pages hear a reason that routers try again."""
    first, second = RouterLink("first"), RouterLink("second")
    ours, theirs = [bench.submit(room, first) for room in (1, 2)], bench.submit(3, second)
    links = Links("e", bench.requests, lambda link, message: None)
    links._open |= {first, second}
    links._close(first, Mock())
    assert bench.engine[3:] == [Abort(id) for id in ours] and bench.readers == [(id, ORPHANED) for id in ours]
    assert list(bench.requests) == [theirs] and links._open == {second}
    bench.requests.deliver([SequenceOutput(id, 0, [TokenOutput(9)]) for id in (*ours, theirs)])
    assert len(second._outbox) == 1 and not first._outbox, "of those that are gone nothing is said"


@pytest.mark.parametrize("begun", [False, True])
async def test_fault_with_one_request_of_a_link_costs_no_other(bench: Bench, begun: bool) -> None:
    link, other = RouterLink("r"), bench.submit(9, RouterLink("other"))

    def submit(link: RouterLink, message: Any) -> None:
        if begun:
            bench.submit(message.request.id.room, link)
        raise KeyError("a fault of ours")

    links = Links("e", bench.requests, submit)
    links._take(link, decode_pb2.DecodeLinkRequest(submit={"request": {"id": {"room": 1}}}))
    [refused] = link._outbox.take()
    assert refused.failure.reason == Reason.INTERNAL and not link._ended
    assert list(bench.requests) == [other] and bench.engine[2:] == [Abort(RequestId(1, 0))] * begun


async def test_attempt_whose_pages_cannot_be_let_go_keeps_no_other_of_its_link(bench: Bench) -> None:
    owner = RouterLink("r")
    ids = [bench.submit(room, owner) for room in (1, 2, 3)]
    bench.requests.on_abort = Mock(side_effect=KeyError)
    assert bench.requests.fail(ids[0], ABORTED)
    bench.requests.drop(owner)
    assert not bench.requests and bench.engine[3:] == [Abort(id) for id in ids]


async def test_output_that_no_message_can_say_fails_its_attempt_alone(bench: Bench) -> None:
    """Else the worker would end, and the next one too, where the router tries the request again."""
    owner = RouterLink("r")
    broken, good = bench.submit(1, owner), bench.submit(2, owner)
    bench.requests.deliver([SequenceOutput(broken, 0, [TokenOutput(-1)]), SequenceOutput(good, 0, [TokenOutput(2)])])
    failed, told = owner._outbox.take()
    assert failed.failure.reason == Reason.INTERNAL and list(told.token_ids) == [2]
    assert list(bench.requests) == [good]


async def test_abort_tells_readers_that_it_was_wanted(bench: Bench) -> None:
    id = bench.submit(1, RouterLink("r"))
    assert bench.requests.abort(id, "test") and bench.readers == [(id, ABORTED)] and bench.engine[-1] == Abort(id)
    assert not bench.requests.abort(RequestId(7, 0), "test")


async def test_repeated_and_foreign_attempts_are_told_apart(bench: Bench, metrics: Metrics) -> None:
    owner = RouterLink("r")
    bench.submit(1, owner)
    wire = worker_pb2.EngineRequest(id={"room": 1}, token_ids=[5], sampling={"max_tokens": 4})
    assert bench.requests.submit(wire, Route.LOCAL, owner) is None and len(bench.engine) == 1
    with pytest.raises(MillraceError, match="belongs to another router"):
        bench.requests.submit(wire, Route.LOCAL, RouterLink("other"))
    assert metrics.worker_stale.labels(kind="submit")._value.get() == 1


async def test_wakeup_in_time_is_true_and_late_is_false() -> None:
    wakeup = Wakeup()
    asyncio.get_running_loop().call_soon(wakeup.fire)
    assert await wakeup.wait(HANG_S) and not await wakeup.wait(0)


async def test_what_fails_ends_what_runs_together_with_it() -> None:
    before, endless = asyncio.all_tasks(), AsyncMock(side_effect=asyncio.Event().wait)
    with pytest.raises(KeyError):
        await together(endless(), AsyncMock(side_effect=KeyError)())
    left = asyncio.all_tasks() - before
    await asyncio.wait(left, timeout=HANG_S)
    assert [task.cancelled() for task in left] == [True]
