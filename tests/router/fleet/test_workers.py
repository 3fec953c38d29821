"""The connection to workers, the hooks of their pairs, readiness and the Admin service."""

import asyncio
from collections.abc import Callable, Coroutine
from itertools import chain, repeat
from types import SimpleNamespace
from unittest.mock import DEFAULT, AsyncMock, Mock

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.v1 import admin_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_router.config import Timeouts
from millrace_router.discovery.base import Target
from millrace_router.fleet import worker as worker_module
from millrace_router.fleet.link import Link
from millrace_router.fleet.registry import Registry
from millrace_router.fleet.warmups import WARMUPS_AT_ONCE
from millrace_router.fleet.worker import FIRST_PAUSE_S, Worker
from millrace_router.flow.metrics import build
from millrace_router.policy.snapshot import Pace
from millrace_rpc.client import heard_within
from millrace_rpc.errors import MillraceError, from_rpc_error
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker, expected, hangs
from router.harness import Cluster, states, until


def detail(made: Cluster, worker: FakeWorker) -> str:
    return next(status.detail for status in made.router.registry.status() if status.address == worker.address)


async def test_every_pair_is_warmed_and_frozen(cluster: Callable) -> None:
    made = await cluster(*(FakeWorker(role) for role in (PREFILL, PREFILL, DECODE, DECODE, UNIFIED)))
    await made.until(lambda: len(made.router.registry.warmups.ready) == 5)
    epochs = sorted(prefill.epoch for prefill in made.prefills)
    assert all(sorted(decode.warmups) == epochs for decode in made.decodes)
    assert all(1 <= worker.freezes <= 2 for worker in made.prefills + made.decodes)  # pairs share what overlaps
    unified = made.workers[-1]
    assert unified.warmups == [""] and unified.freezes == 1
    assert made.metric("millrace_warmups_total", call="warmup", outcome="ok") == 5


async def test_warmups_are_tried_until_acknowledged(cluster: Callable) -> None:
    decode = FakeWorker(DECODE)
    decode.warmup_failures.extend(["TRANSFER_FAILED", "NOT_READY"])
    made = await cluster(FakeWorker(PREFILL), decode, wait=False)
    await made.until(lambda: made.metric("millrace_pairs", state="retrying") == 1)
    assert not made.router.registry.ready and "scripted" in detail(made, decode)
    await made.until(lambda: made.router.registry.ready)
    assert made.metric("millrace_warmups_total", call="warmup", outcome="failed") == 2
    assert [made.metric("millrace_pairs", state=state) for state in ("warming", "freezing", "retrying", "ready")] == [
        *(0, 0, 0, 1)
    ]
    (pair,) = (await made.admin.ListWorkers(admin_pb2.ListWorkersRequest())).pairs
    assert (pair.state, pair.attempts, pair.detail) == ("ready", 3, "")


@pytest.mark.parametrize(
    ("replicas", "reported", "words"),
    [
        (2**32 - 1, 1, "replicas of the worker is 4294967295; the limit is 1024"),
        (1, 2, "replicas must have at most 1 entries, not 2"),
    ],
)
async def test_a_worker_with_more_replicas_than_there_can_be_is_not_used(
    cluster: Callable, replicas: int, reported: int, words: str
) -> None:
    """What it says sizes lists and loops of the router."""

    class Boasting(FakeWorker):
        async def GetInfo(self, request, context):
            info = await super().GetInfo(request, context)
            info.replicas = replicas
            return info

        async def WatchLoad(self, request, context):
            async for load in super().WatchLoad(request, context):
                load.replicas.extend(load.replicas[:1] * (reported - 1))
                yield load

    made = await cluster(Boasting(UNIFIED), FakeWorker(UNIFIED), wait=False)
    await made.until(lambda: words in detail(made, made.workers[0]) and made.router.registry.ready)
    assert (await made.generate([1])).tokens() == expected([1], 8)


class Warming(FakeWorker):
    """Counts the warm-ups that run at once; they end when `go` is set."""

    def __init__(self) -> None:
        super().__init__(DECODE)
        self.go, self.running, self.most = asyncio.Event(), 0, 0

    async def Warmup(self, request, context):
        self.running += 1
        self.most = max(self.most, self.running)
        await self.go.wait()
        self.running -= 1
        return await super().Warmup(request, context)


async def test_a_decode_worker_warms_a_few_pairs_at_a_time(cluster: Callable) -> None:
    decode = Warming()
    made = await cluster(*(FakeWorker(PREFILL) for _ in range(WARMUPS_AT_ONCE + 2)), decode, wait=False)
    warmups = made.router.registry.warmups
    await made.until(lambda: decode.running == WARMUPS_AT_ONCE and warmups._warming[decode.epoch].locked())
    assert len(warmups.progress) == WARMUPS_AT_ONCE + 2
    decode.go.set()
    await made.until(lambda: len(made.router.registry.warmups.ready) == WARMUPS_AT_ONCE + 2)
    assert decode.most == WARMUPS_AT_ONCE


async def test_after_a_fault_of_ours_only_what_is_not_acknowledged_is_tried_again(
    cluster: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults, refresh = [AttributeError("of an answer that could not be read")], Worker.refresh

    async def faulty(worker: Worker) -> None:
        if worker.link is not None and faults:
            raise faults.pop()
        await refresh(worker)

    monkeypatch.setattr(Worker, "refresh", faulty)
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), wait=False)
    await made.until(lambda: made.router.registry.ready)
    assert not faults and (await made.generate([1])).tokens() == expected([1], 8)
    assert [worker.freezes for worker in made.workers] == [1, 1] and len(made.decodes[0].warmups) == 1


async def test_a_new_process_is_warmed_again(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE))
    (prefill,), (decode,) = made.prefills, made.decodes
    before = prefill.epoch
    await prefill.restart()
    await made.until(lambda: decode.warmups == [before, prefill.epoch])
    await made.until(lambda: made.router.registry.ready)
    assert made.router.registry.workers[prefill.address]._pause == FIRST_PAUSE_S, (
        "the next loss is not waited for longer"
    )
    assert (await made.generate([1])).tokens() == expected([1], 8)
    assert decode.sources[-1].epoch == prefill.epoch != before


@pytest.mark.parametrize("state", ["LOADING", "DRAINING"])
async def test_only_ready_workers_get_requests(cluster: Callable, state: str) -> None:
    prefill = FakeWorker(PREFILL)
    prefill.state = worker_pb2.WorkerState.Value(f"WORKER_STATE_{state}")
    made = await cluster(prefill, FakeWorker(DECODE), wait=False)
    await made.until(lambda: state.lower() in detail(made, prefill))
    assert not made.router.registry.ready
    prefill.change(state=worker_pb2.WORKER_STATE_READY)
    await made.until(lambda: made.router.registry.ready)


@pytest.mark.parametrize(("starved", "factor"), [(0.0, 1), (0.5, 2), (0.99, 10)])
async def test_a_starved_workers_silence_may_last_longer(
    cluster: Callable, monkeypatch: pytest.MonkeyPatch, starved: float, factor: float
) -> None:
    """By the part of the time in which its ranks get no CPU, as its latest report says."""
    allowed: list[float] = []

    async def heard(silence_s: float, reading: Coroutine) -> object:
        allowed.append(silence_s)
        return await heard_within(60.0, reading)

    monkeypatch.setattr(worker_module, "heard_within", heard)
    made = await cluster(FakeWorker(UNIFIED), timeouts={"silence": 1.0})
    made.workers[0].starved = starved
    made.workers[0].change()
    await made.until(lambda: allowed[-1] == pytest.approx(factor))


async def linked(fake: FakeWorker) -> tuple[Worker, asyncio.Task[None]]:
    """The router's side of a worker, without a router, and the task that keeps its connection."""

    def nothing() -> None: ...

    worker = Worker(
        Target("fake", await fake.start()),
        worker_pb2.LinkHello(router_id="router"),
        Timeouts(),
        build(),
        nothing,
        nothing,
    )
    running = asyncio.create_task(worker.run())
    await until(lambda: worker.link is not None)
    return worker, running


async def test_a_stop_at_the_moment_of_a_loss_stops() -> None:
    """Before Python 3.13, a task group that is ending with an error swallows a cancellation."""

    class SubRequest:
        attempt, replica, exports = 0, 0, False

        def on_output(self, out: worker_pb2.SequenceOutput, now: float) -> None: ...

        def on_failure(self, error: MillraceError) -> None:
            running.cancel()

    fake = FakeWorker(UNIFIED)
    worker, running = await linked(fake)
    fake.script.append(hangs())
    worker.link.submit(worker_pb2.EngineRequest(id={"room": 1}), None, SubRequest())
    await fake.stop()
    await asyncio.wait({running})
    assert running.cancelled()


async def test_a_worker_that_is_let_go_is_lost_to_who_still_has_it() -> None:
    """Its channel is closed, which a call on it reports as a fault of ours."""

    fake = FakeWorker(UNIFIED)
    worker, running = await linked(fake)
    running.cancel()
    await asyncio.wait({running})
    with pytest.raises(MillraceError) as caught:
        await worker.refresh()
    assert caught.value.reason is Reason.WORKER_LOST
    await fake.stop()


async def test_a_fault_of_ours_does_not_lose_the_worker_for_ever(cluster: Callable) -> None:
    """Nor does one with the states of all workers, when it is lost."""
    made = await cluster(FakeWorker(UNIFIED))
    keep = made.router.registry.health.keep
    made.router.registry.health.keep = Mock(wraps=keep, side_effect=chain([KeyError] * 2, repeat(DEFAULT)))
    worker = made.router.registry.workers[made.workers[0].address]
    worker.link.on_message = Mock(side_effect=KeyError("a fault"))
    sub = SimpleNamespace(attempt=0, replica=0, exports=False, on_failure=lambda error: None)
    worker.link.submit(worker_pb2.EngineRequest(id={"room": 1}, sampling={"max_tokens": 1}), None, sub)
    await made.until(lambda: "KeyError" in worker.trouble)
    await made.until(lambda: made.router.registry.ready)
    assert (await made.generate([1])).tokens() == expected([1], 8)


async def test_details_of_what_is_not_routable(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL, layout="x"), FakeWorker(DECODE, layout="y"), wait=False)
    for worker in made.workers:
        await made.until(lambda worker=worker: "equal KV layout" in detail(made, worker))
    assert (await made.http.get("/ready")).status_code == 503
    assert states(made, "prefill") == states(made, "decode") == [1, 1, 0]
    await made.workers[1].stop()
    await made.until(lambda: "unreachable" in detail(made, made.workers[1]))
    assert states(made, "decode") == [1, 0, 0]
    statuses = (await made.admin.ListWorkers(admin_pb2.ListWorkersRequest())).workers
    assert [status.reachable for status in statuses] == [True, False]


class Numbered(FakeWorker):
    """Each of its reports has a number."""

    number = 0

    @property
    def counts(self) -> dict[str, int | list[int]]:
        self.number += 1
        return {"counters": {"steps": self.number}}

    @counts.setter
    def counts(self, _: object) -> None: ...


async def test_a_burst_is_spread_before_the_next_report(cluster: Callable) -> None:
    workers = [Numbered(role) for role in (PREFILL, PREFILL, *[DECODE] * 4)]
    made = await cluster(*workers, timeouts={"silence": 60})
    for worker in workers:
        worker.silent = True
    known = made.router.registry.workers  # a report that is on its way would come in the middle of the burst
    await made.until(lambda: all(known[w.address].load.replicas[0].counters["steps"] == w.number for w in workers))
    for decode in made.decodes:
        decode.script.extend([hangs()] * 8)
    tasks = [asyncio.create_task(made.generate([1])) for _ in range(8)]
    await made.until(lambda: sum(len(worker.submitted) for worker in workers) == 16)
    assert {len(decode.submitted) for decode in made.decodes} == {2}
    assert {len(prefill.submitted) for prefill in made.prefills} == {4}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await made.quiet()


async def test_grpc_health_follows_readiness(cluster: Callable) -> None:
    made = await cluster(FakeWorker(UNIFIED))
    request = health_pb2.HealthCheckRequest(service="millrace.v1.Inference")
    call = health_pb2_grpc.HealthStub(made.public).Watch(request)

    async def told(wanted: int) -> None:
        while (await call.read()).status != wanted:
            pass

    await told(health_pb2.HealthCheckResponse.SERVING)
    await made.workers[0].stop()
    await told(health_pb2.HealthCheckResponse.NOT_SERVING)
    await made.workers[0].restart()
    await told(health_pb2.HealthCheckResponse.SERVING)


async def test_a_drained_worker_gets_nothing_until_it_restarts(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), FakeWorker(DECODE))
    first, second = made.decodes
    await made.admin.DrainWorker(admin_pb2.DrainWorkerRequest(address=first.address))
    assert first.drained and detail(made, first) == "draining"
    for _ in range(3):
        await made.generate([1])
    assert len(second.submitted) == 3 and not first.submitted
    await first.restart()
    await made.until(lambda: not detail(made, first))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await made.admin.DrainWorker(admin_pb2.DrainWorkerRequest(address="nowhere:1"))
    assert from_rpc_error(caught.value).reason is Reason.NOT_FOUND


def test_work_of_a_begun_prompt_counts_once() -> None:
    """A worker with two prompts of 640 tokens, one of them half computed, and 100 tokens of KV sent since."""
    worker = Worker(Target("w", "w:1"), "r", Timeouts(), build(), lambda: None, lambda: None)
    worker.info = worker_pb2.WorkerInfo(layout={"page_size": 64})
    load = worker_pb2.ReplicaLoad(waiting_tokens=640 + 320, begun_tokens=320, pages_running=10, capacity=3)
    load.room = 900
    worker.load = worker_pb2.LoadSnapshot(replicas=[load, load])
    worker.note_sent(0, 5, 100, 30)
    worker.note_sent(1, 7, 0, 1)
    replica, other = worker.replicas()
    assert (replica.tokens, replica.held, replica.load) == (965, 420, 640 + 640 + 105)
    assert replica.room == 900 - 5 - 100 - 30 and replica.capacity == 2
    assert (other.tokens, other.room, other.capacity) == (967, 900 - 8, 2), "of each replica what was sent there"


def test_a_batch_has_what_this_router_knows_of_it() -> None:
    """Reports are late: of four sequences, one is another router's, and two of ours have ended or come since."""
    worker = Worker(Target("w", "w:1"), "r", Timeouts(), build(), lambda: None, lambda: None)
    worker.link = link = Link(UNIFIED, "w:1", build())

    def slots(report: int | None = None, **load: int) -> tuple[int, int]:
        if report is not None:
            one = worker_pb2.ReplicaLoad(max_running=4, active=report, **({"capacity": 6 - report} | load))
            worker.note_load(worker_pb2.LoadSnapshot(replicas=[one]))
        replica = worker.replicas()[0]
        return replica.free_slots, replica.capacity

    def submit(room: int, exports: bool = False) -> None:
        sub = SimpleNamespace(attempt=0, replica=0, exports=exports)
        link.submit(worker_pb2.EngineRequest(id={"room": room}), None, sub)  # type: ignore[arg-type]
        worker.note_sent(0, 1, 0, 1)

    assert slots(1) == (3, 5), "another router's"
    for room in range(3):
        submit(room)
    assert slots() == (0, 2) == slots(4) and slots(2) == (1, 3), "a late report hides another router's sequence"
    assert [slots(4), slots(4)] == [(1, 3), (0, 2)], "two reports in a row are believed"
    link.forget(0)
    link.abort(1, 0, "the client has left")
    assert slots() == (2, 4) == slots(4), "before the report, and beside one that still has them"
    submit(3, exports=True)
    assert slots() == (2, 4) and slots(2) == (2, 4), "its KV goes elsewhere"
    link.forget(3)
    submit(2)
    assert slots() == (2, 4), "the next attempt of the same request"
    assert slots(3, capacity=0) == (2, 0), "it has no pages"


def linked_subs(heard: list[object], **broken: Callable) -> Link:
    """A Link with the sub-requests of two rooms, the first of which has the `broken` methods."""
    link = Link(UNIFIED, "a:1", build())
    for room in (1, 2):
        told = {name: lambda what, *_: heard.append(what) for name in ("on_output", "on_wait", "on_failure")}
        sub = SimpleNamespace(attempt=0, replica=0, exports=False, **(told | broken if room == 1 else told))
        link.submit(worker_pb2.EngineRequest(id={"room": room}), None, sub)  # type: ignore[arg-type]
    return link


@pytest.mark.parametrize("broken", ["on_output", "on_wait"])
async def test_what_breaks_one_sub_request_breaks_no_other(broken: str) -> None:
    """One that cannot note a wait goes on."""
    heard, fault = list[object](), {broken: Mock(side_effect=KeyError)}
    link = linked_subs(heard, **fault, on_failure=lambda error: heard.append(error.reason))
    outputs = [worker_pb2.SequenceOutput(id={"room": room}) for room in (1, 2)]
    waits = [worker_pb2.Wait(id={"room": room}, over=True) for room in (1, 2)]
    step = worker_pb2.LinkResponse(outputs=worker_pb2.StepOutputs(outputs=outputs, waits=waits))
    link._read = AsyncMock(side_effect=[step, EOFError])  # type: ignore[method-assign]
    with pytest.raises(EOFError):
        await link.run()
    first, left = (Reason.INTERNAL, 1) if broken == "on_output" else (outputs[0], 2)
    assert heard == [first, outputs[1], True] and link.in_flight == left


def test_one_sub_request_that_fails_to_fail_keeps_no_other_from_it() -> None:
    """Else it would wait until its time is over."""
    heard, lost = list[object](), MillraceError(Reason.WORKER_LOST, "it is gone")
    linked_subs(heard, on_failure=Mock(side_effect=KeyError)).close(lost)
    assert heard == [lost]


def test_a_worker_that_reports_no_replica_has_no_pace() -> None:
    worker = SimpleNamespace(role=UNIFIED, in_flight=2, replicas=lambda *_: ())
    registry = SimpleNamespace(_able=[(worker, frozenset())], _serves=lambda _: True)
    assert Registry.pace(registry) == Pace(2, 0.0)  # type: ignore[arg-type]
