"""A worker as a process: what routers, operators and Kubernetes see of it."""

import asyncio
import re
import signal
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace.v1 import common_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError, from_rpc_error
from millrace_testing import HANG_S
from millrace_testing.fake_router import FakeLink, request
from millrace_testing.inside import Inside, inside, one
from millrace_testing.procs import SIM, Worker, gone, workers
from millrace_testing.shared import shared
from millrace_testing.sim import expected, prompt_of

# 100,000 tokens last longer than any wait: a request is caught in the act.
SLOW = (*SIM, "sim={step_s: 0.01}", "limits={max_model_len: 131072, num_pages: 2100}")
STOP, LENGTH, ABORT, ERROR = (
    common_pb2.FINISH_REASON_STOP,
    common_pb2.FINISH_REASON_LENGTH,
    common_pb2.FINISH_REASON_ABORT,
    common_pb2.FINISH_REASON_ERROR,
)


pytestmark = pytest.mark.asyncio(loop_scope="module")


unified = shared(lambda: one("unified"))
slow = shared(lambda: one("unified", SLOW))


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Worker]:
    """One worker of two replicas for all tests that leave it as they found it."""
    async with workers(tmp_path_factory.mktemp("two"), "unified", sets=(*SIM, "dp=2")) as [worker]:
        yield worker


async def http(worker: Worker, path: str) -> tuple[int, str]:
    def get() -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{worker.facts['metrics']}{path}", timeout=HANG_S) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    return await asyncio.to_thread(get)


async def health(worker: Worker) -> int:
    stub = health_pb2_grpc.HealthStub(worker.channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=HANG_S)).status


async def test_unified_worker_generates_and_describes_itself(unified: Worker) -> None:
    info = await unified.info()
    assert (info.role, info.epoch, info.replicas, info.tp) == (worker_pb2.ROLE_UNIFIED, unified.epoch, 1, 1)
    assert info.worker_id == unified.epoch and info.model == "sim" and info.layout.fingerprint
    assert info.vocab_size == 32768 and list(info.eos_token_ids) == [1] and info.max_context == 8192
    assert await health(unified) == health_pb2.HealthCheckResponse.SERVING
    async with FakeLink(unified) as link:
        requests = [request(prompt_of(length), max_tokens=20, logprobs=2) for length in (1, 64, 65, 2100)]
        for r in requests:
            link.submit(r)
        for r in requests:
            assert (await link.finish(r)).finish_reason == LENGTH
            assert link.tokens(r) == expected(list(r.token_ids), 20)
            indices = [index for o in link.of(r) for index in range(o.first_index, o.first_index + len(o.token_ids))]
            assert indices == list(range(20))
            assert all(len(lp.top) == 2 for o in link.of(r) for lp in o.logprobs)
    assert await unified.metric("millrace_worker_state", state="ready") == 1
    assert await unified.metric("millrace_engine_total", what="output_tokens") >= 80
    assert (await http(unified, "/ready")) == (200, "ready\n")
    assert (await http(unified, "/nothing"))[0] == 404
    await unified.whole()


async def test_requests_refused_get_one_error_and_the_link_goes_on(unified: Worker) -> None:
    async with FakeLink(unified) as link:
        bad = {
            "temperature": request([1], temperature=float("nan")),
            "token_ids": request([]),
            "40000": request([40_000]),
            "4294967295": request([2**32 - 1]),
            "max_model_len": request([1] * 9000),
            "replica": request([1]),
            "source": request([1]),
        }
        bad["replica"].replica = 1
        for name, r in bad.items():
            link.submit(r, source=worker_pb2.KvSourceRef(address="x") if name == "source" else None)
        for name, r in bad.items():
            end = await link.finish(r)
            assert end.finish_reason == ERROR and name in end.failure.message, (name, end)
            assert end.failure.reason in (Reason.INVALID_ARGUMENT, Reason.CONTEXT_TOO_LONG)
        good = request([1, 2, 3])
        link.submit(good)
        await link.finish(good)
        assert link.tokens(good) == expected([1, 2, 3], 8)


async def test_request_sent_twice_is_done_once(slow: Inside) -> None:
    async with FakeLink(slow) as link:
        good = request([1, 2, 3], max_tokens=20)
        link.submit(good)
        link.submit(good)
        await link.finish(good)
        assert link.tokens(good) == expected([1, 2, 3], 20)
        assert await slow.metric("millrace_worker_stale_messages_total", kind="submit") == 1


async def test_link_with_another_epoch_is_refused(unified: Worker) -> None:
    with pytest.raises(MillraceError) as caught:
        async with FakeLink(unified, epoch="another"):
            pass
    assert caught.value.reason is Reason.EPOCH_CHANGED


async def test_routers_with_different_cache_keys_are_named_in_the_log(
    unified: Worker, caplog: pytest.LogCaptureFixture
) -> None:
    words = "have different secrets, so prompts share no cached pages"
    for key in (b"one", b""):
        async with FakeLink(unified, router_id="a", cache_key_id=b"one"), FakeLink(unified, "", "b", key):
            assert words not in caplog.text
    async with FakeLink(unified, router_id="c", cache_key_id=b"one"), FakeLink(unified, "", "d", b"two"):
        assert f"routers d and c {words}" in caplog.text


async def test_abort_on_the_link_or_by_rpc_ends_the_request(slow: Inside) -> None:
    async with FakeLink(slow) as link:
        on_link, by_rpc = request([1], max_tokens=1000), request([2], max_tokens=1000)
        for r in (on_link, by_rpc):
            await link.begun(r)
        link.abort(on_link)
        abort = worker_pb2.AbortRequest(id=by_rpc.id, reason="test")
        assert (await slow.stub.Abort(abort)).found
        for r in (on_link, by_rpc):
            assert (await link.finish(r)).finish_reason == ABORT
        await slow.whole()
        assert not (await slow.stub.Abort(abort)).found
        assert await slow.metric("millrace_worker_stale_messages_total", kind="abort") == 1


async def test_link_dropped_aborts_its_own_requests_only(slow: Inside) -> None:
    async with FakeLink(slow) as stays:
        async with FakeLink(slow) as drops:
            lost, kept = request([1], max_tokens=100_000), request([2], max_tokens=100)
            drops.submit(lost)
            stays.submit(kept)
            await drops.first(lost)
        await stays.finish(kept)
        assert stays.tokens(kept) == expected([2], 100)
        await slow.whole()


async def test_slow_router_holds_up_nobody_and_loses_nothing(unified: Worker) -> None:
    async with FakeLink(unified) as fast, FakeLink(unified) as slow:
        slow.pause()
        ours = [request([i], max_tokens=1000) for i in range(1, 17)]
        for r in ours:
            slow.submit(r)
        quick = request([99], max_tokens=1000)
        fast.submit(quick)
        await fast.finish(quick)
        slow.resume()
        for r in ours:
            await slow.finish(r)
            assert slow.tokens(r) == expected(list(r.token_ids), 1000)


async def test_freeze_gc_again_is_answered_by_every_process(two: Worker) -> None:
    answers = await asyncio.gather(*(two.stub.FreezeGc(worker_pb2.FreezeGcRequest()) for _ in range(2)))
    assert all(answer.processes == 3 and answer.frozen_objects > 10_000 for answer in answers)
    assert (await two.info()).gc_freezes == 2
    assert await two.metric("millrace_gc_freezes_total", process="frontend") == 2
    assert await two.metric("millrace_gc_pause_seconds_count", process="rank", generation="2") >= 2


async def test_warmup_of_a_ready_worker_keeps_its_prefix_cache(two: Worker) -> None:
    """Each router has a worker warmed up that it meets, also one that was away or has restarted."""
    async with FakeLink(two) as link:
        prompt = prompt_of(640)
        for attempt in range(2):
            r = request(prompt)
            link.submit(r)
            await link.finish(r)
            assert (link.of(r)[0].cached_tokens > 0) is (attempt > 0)
            before = (await two.whole()).replicas
            await two.stub.Warmup(worker_pb2.WarmupRequest())
            after = (await two.whole()).replicas
            computed = [
                b.counters["prompt_tokens"] - a.counters["prompt_tokens"] for a, b in zip(before, after, strict=True)
            ]
            assert computed == [1, 1], "of each replica"


async def test_flush_waits_for_every_replica(two: Worker) -> None:
    async with FakeLink(two) as link:
        requests = [request(prompt_of(640)) for _ in range(2)]
        for replica, r in enumerate(requests):
            r.replica = replica
            link.submit(r)
        for r in requests:
            await link.finish(r)
        cached = [replica.pages_cached for replica in (await two.whole()).replicas]
        assert min(cached) >= 10
        assert (await two.stub.FlushCache(worker_pb2.FlushCacheRequest())).pages == sum(cached)
        assert not any(replica.pages_cached for replica in (await two.load()).replicas)
        assert (await two.stub.Warmup(worker_pb2.WarmupRequest())).seconds > 0


async def test_replicas_serve_side_by_side(two: Worker) -> None:
    before = [replica.counters["prompt_tokens"] for replica in (await two.whole()).replicas]
    async with FakeLink(two) as link:
        requests = [request([i]) for i in range(1, 9)]
        for i, r in enumerate(requests):
            r.replica = i % 2
            link.submit(r)
        for r in requests:
            await link.finish(r)
            assert link.tokens(r) == expected(list(r.token_ids), 8)
        after = [replica.counters["prompt_tokens"] for replica in (await two.whole()).replicas]
        assert [count - old for count, old in zip(after, before, strict=True)] == [4, 4]


async def refusal(worker: Worker) -> Reason:
    """Why no link opens. Where a server ends a stream that is being written to, gRPC may say no more than that it is
    broken: then another try, as a router makes.
    """
    reason = Reason.TRANSFER_FAILED
    while reason in (Reason.WORKER_LOST, Reason.TRANSFER_FAILED):
        with pytest.raises(MillraceError) as caught:
            async with FakeLink(worker):
                pass
        reason = Reason(caught.value.reason)
    return reason


async def test_signal_drains_and_exits_with_0(tmp_path: Path) -> None:
    patient = (*SLOW, f"timeouts.drain={HANG_S}")
    async with workers(tmp_path, "unified", sets=patient) as [worker], FakeLink(worker) as link:
        family = worker.family()
        running = await link.begun(request([1], max_tokens=60))
        endless = await link.begun(request([2], max_tokens=100_000))
        worker.process.send(signal.SIGTERM)
        while await health(worker) == health_pb2.HealthCheckResponse.SERVING:
            await asyncio.sleep(0.01)
        assert await refusal(worker) is Reason.DRAINING
        late = request([3])
        link.submit(late)
        assert (await link.finish(late)).failure.reason == Reason.DRAINING
        await link.finish(running)
        assert link.tokens(running) == expected([1], 60)
        link.abort(endless)
        assert await worker.process.wait() == 0
        await gone(family)


async def test_drain_out_of_time_fails_what_still_runs() -> None:
    async with inside("unified", sets=SLOW) as [worker], FakeLink(worker) as link:
        running = await link.begun(request([1], max_tokens=100_000))
        answer = await worker.stub.Drain(worker_pb2.DrainRequest(timeout_s=0.05))
        assert answer.aborted == 1
        assert (await link.finish(running)).failure.reason == Reason.DRAINING
        load = await worker.whole()
        assert load.state == worker_pb2.WORKER_STATE_DRAINING
        assert (await http(worker, "/ready")) == (503, "draining\n")


async def test_second_signal_in_a_drain_ends_the_worker_at_once(tmp_path: Path) -> None:
    async with workers(tmp_path, "unified", sets=SLOW) as [worker], FakeLink(worker) as link:
        family = worker.family()
        await link.begun(request([1], max_tokens=100_000))
        worker.process.send(signal.SIGINT)
        await worker.until(lambda: "SIGINT: draining" in worker.process.log_tail(), "the drain")
        worker.process.send(signal.SIGTERM)
        assert await worker.process.wait() == 130
        await gone(family)


async def test_rank_killed_fails_everything_and_ends_the_worker(tmp_path: Path) -> None:
    async with workers(tmp_path, "unified", sets=(*SLOW, "dp=2")) as [worker], FakeLink(worker) as link:
        family = worker.family()
        running = await link.begun(request([1], max_tokens=100_000))
        worker.ranks()[1].kill()  # not even the one that works on it
        assert (await link.finish(running)).failure.reason == Reason.WORKER_LOST
        error = await link.end()
        assert error is not None and from_rpc_error(error).reason is Reason.WORKER_LOST
        assert await worker.process.wait() == 1
        await gone(family)


async def test_start_that_fails_says_why_and_exits_with_1(tmp_path: Path) -> None:
    """A warm-up that cannot end in time stands for everything that goes wrong before READY."""
    worker = Worker("unified", tmp_path, (*SLOW, "timeouts={warmup: 0.01}"))
    try:
        await worker.start()
        assert await worker.process.wait() == 1
        assert "could not start: STALLED: the warm-up took longer than 0.01 s" in worker.process.log_tail()
    finally:
        await worker.close()


async def test_start_that_nothing_mends_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    """A rank refuses its settings; test_finite_logits.py has a checkpoint that is refused."""
    (tmp_path / "file").touch()
    tiers = f"limits={{host_cache_gib: 0.01, disk_cache: {tmp_path}/file/kv, disk_cache_gib: 0.1}}"
    worker = Worker("unified", tmp_path, (*SIM, tiers))
    try:
        await worker.start()
        assert await worker.process.wait() == 2
        log = worker.process.log_tail()
        assert re.search(rf"could not start: WORKER_LOST: rank 0 failed: .*{tmp_path}/file", log)
        assert "Traceback" not in log
    finally:
        await worker.close()


async def test_port_taken_or_config_wrong_exits_with_a_message(unified: Worker, tmp_path: Path) -> None:
    for item, message in ((f"grpc_port={unified.facts['grpc']}", "cannot listen"), ("nonsense=1", "unknown key")):
        other = Worker("unified", tmp_path, (*SIM, item), name="other")
        with pytest.raises(AssertionError, match=message):
            await other.start()
        assert other.process.returncode in (1, 2)


async def test_watch_load_sends_at_least_each_interval(unified: Worker) -> None:
    call = unified.stub.WatchLoad(worker_pb2.WatchLoadRequest(min_interval_ms=10, max_interval_ms=50))
    snapshots = [await call.read() for _ in range(4)]
    assert all(s is not grpc.aio.EOF and s.epoch == unified.epoch for s in snapshots)
    assert snapshots[0].replicas[0].capacity > 0
    call.cancel()


async def test_frontend_killed_takes_its_ranks_along(two: Worker) -> None:
    """The last test: it ends the worker."""
    family = two.family()
    assert len(two.ranks()) == 2
    two.process.send(signal.SIGKILL)
    await gone(family)
