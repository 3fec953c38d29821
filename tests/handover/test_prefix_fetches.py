"""Cached prefixes that travel back to prefill workers, with NIXL between them.

Every test ends with the pools of all workers whole, and with the tokens of the oracle, whatever happens to a prefix
fetch.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeAlias

import grpc
import pytest
import pytest_asyncio
from millrace.v1 import common_pb2, kv_pb2, kv_pb2_grpc, prefill_pb2, worker_pb2
from millrace_common.page_hash import page_hashes
from millrace_common.reasons import Reason
from millrace_serve.handover import prefix_fetches
from millrace_testing import HANG_S
from millrace_testing.fake_router import FakeLink, FakePair, request
from millrace_testing.inside import Inside, inside
from millrace_testing.patient_worker import PATIENCE_S
from millrace_testing.procs import SIM, Worker, workers
from millrace_testing.sim import expected, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")

Waiting: TypeAlias = tuple[FakeLink, worker_pb2.EngineRequest, Callable[[], None]]
PAGE = 64
# Pools of 40 pages: a held prompt of 30 makes the next one of 12 wait in the queue, and 10 may be served.
TIGHT = (*SIM, "limits.num_pages=41", "limits.max_model_len=2048", "timeouts={stall: 3.0}")
HELD, FETCHED = 30 * PAGE, 11 * PAGE


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def three() -> AsyncIterator[list[Inside]]:
    """A prefill, a decode and a unified worker for all tests that leave them as they found them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefix_fetches, "OFFER_S", PATIENCE_S)
        async with inside("prefill", "decode", "unified") as all_three:
            yield all_three


async def cache(worker: Worker, prompt: list[int], salt: bytes = b"") -> None:
    """Make `worker` compute the prompt alone."""
    async with FakeLink(worker) as link:
        r = await link.begun(request(prompt, max_tokens=2, salt=salt))
        if worker.role == "prefill":
            link.abort(r)  # it is held there
        else:
            await link.finish(r)
        await worker.whole()


async def prefix(prefix_source: Worker, num_pages: int, replica: int = 0) -> prefill_pb2.KvPrefixRef:
    return prefill_pb2.KvPrefixRef(worker=await prefix_source.source(), replica=replica, num_pages=num_pages)


async def failures(worker: Worker, reason: str) -> float:
    return await worker.metric("millrace_prefix_fetch_failures_total", reason=reason)


async def pages(worker: Worker, direction: str) -> float:
    return await worker.metric("millrace_prefix_fetch_pages_total", direction=direction)


async def until(worker: Worker, what: str, condition: Callable[[worker_pb2.ReplicaLoad], bool]) -> None:
    while not condition((await worker.load()).replicas[0]):
        assert worker.process.running, what
        await asyncio.sleep(0.02)


async def until_counted(read: Callable[[], object], value: float) -> None:
    while await read() < value:  # type: ignore[misc,operator]
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("prefix_source", [1, 2])
async def test_prompt_cached_elsewhere_is_fetched_and_handed_over(three: list[Inside], prefix_source: int) -> None:
    """From the decode worker that goes on with the very attempt, and from a unified worker."""
    prefill, decode = three[0], three[1]
    history = prompt_of(1000)
    await cache(three[prefix_source], history)
    before = await pages(prefill, "fetched"), await pages(three[prefix_source], "served")
    async with FakePair(prefill, decode) as both:
        r = request([*history, *prompt_of(100)], max_tokens=8)
        both.to_decode.submit(r, both.source)
        both.to_prefill.submit(r, await prefix(three[prefix_source], 15))
        assert (await both.to_prefill.first(r)).cached_tokens == 15 * PAGE
        await both.to_decode.finish(r)
        assert both.to_decode.tokens(r) == expected(list(r.token_ids), 8)
    assert await pages(prefill, "fetched") == before[0] + 15
    assert await pages(three[prefix_source], "served") == before[1] + 15
    load = await prefill.load()
    assert load.prefix_fetch_seconds >= 0 and load.read_bytes_per_s > 0
    for worker in three:
        await worker.whole()


async def test_prefix_of_another_salt_is_not_served(three: list[Inside]) -> None:
    """A pair and a prefix fetch: with equal salts the pages come, and with other ones the tokens are the same."""
    prefill, decode, prefix_source = three
    history = prompt_of(1000)
    await cache(prefix_source, history, salt=b"one")
    for salt, found in ((b"two", 0), (b"", 0), (b"one", 15 * PAGE)):
        before = await failures(prefill, Reason.KV_NOT_FOUND)
        async with FakePair(prefill, decode) as both:
            r = request([*history, 7], max_tokens=8, salt=salt)
            both.to_decode.submit(r, both.source)
            both.to_prefill.submit(r, await prefix(prefix_source, 15))
            assert (await both.to_prefill.first(r)).cached_tokens == found
            await both.to_decode.finish(r)
            assert both.to_decode.tokens(r) == expected(list(r.token_ids), 8)
        assert await failures(prefill, Reason.KV_NOT_FOUND) == before + (not found)
    for worker in three:
        await worker.whole()


async def test_blocks_of_another_length_are_refused(three: list[Inside]) -> None:
    prefix_source = three[2]
    source = await prefix_source.source()
    for blocks, words in (([], "must not be empty"), ([b"7" * 32, b"short"], "must have 32 bytes each")):
        wanted = kv_pb2.FetchPrefix(replica=0, blocks=blocks)
        id = common_pb2.AttemptId(room=1)
        begin = kv_pb2.FetchOpen(id=id, epoch=prefix_source.epoch, fingerprint=source.fingerprint, prefix=wanted)
        call = kv_pb2_grpc.KvServiceStub(prefix_source.channel).Fetch(timeout=HANG_S)
        await call.write(kv_pb2.FetchRequest(open=begin))
        with pytest.raises(grpc.aio.AioRpcError, match=f"prefix.blocks {words}"):
            await call.read()


async def test_fetch_by_guess_is_told_no_memory(three: list[Inside]) -> None:
    """A guess of blocks, of tokens without their salt or of a request's id gets no address of memory, nor its keys."""
    prefix_source, history = three[2], prompt_of(200)
    await cache(prefix_source, history, salt=b"one")
    source = await prefix_source.source()
    stub = kv_pb2_grpc.KvServiceStub(prefix_source.channel)

    async def told(**what: Any) -> list[str]:
        """The messages of one Fetch, up to its end or to the first that only says that the source lives."""
        begin = kv_pb2.FetchOpen(epoch=prefix_source.epoch, fingerprint=source.fingerprint, **what)
        call = stub.Fetch(timeout=HANG_S)
        await call.write(kv_pb2.FetchRequest(open=begin))
        seen = []
        with contextlib.suppress(grpc.aio.AioRpcError):
            while (message := await call.read()) is not grpc.aio.EOF and not message.HasField("heartbeat"):
                seen.append(message.WhichOneof("message"))
                if seen[-1] == "chunk":
                    await call.write(kv_pb2.FetchRequest(release=kv_pb2.FetchRelease()))
        call.cancel()
        return [kind for kind in seen if kind != "release_confirmed"]

    for salt, found in ((b"one", ["source", "chunk"]), (b"two", ["chunk"]), (b"", ["chunk"])):
        blocks = page_hashes(history[: 3 * PAGE], PAGE, salt=salt)
        assert await told(id={"room": 1}, prefix=kv_pb2.FetchPrefix(blocks=blocks)) == found
    assert await told(id={"room": 1}, prefix=kv_pb2.FetchPrefix(blocks=[b"7" * 32])) == ["chunk"]
    assert await told(id={"room": 12345}) == []
    await prefix_source.whole()


async def test_reference_that_leads_nowhere_costs_only_the_prompt(three: list[Inside]) -> None:
    prefill, decode = three[0], three[1]
    good = await decode.source()
    lost = worker_pb2.KvSourceRef(address="127.0.0.1:1", epoch="0", fingerprint=good.fingerprint)
    restarted = worker_pb2.KvSourceRef(address=decode.address, epoch="0", fingerprint=good.fingerprint)
    other = worker_pb2.KvSourceRef(address=decode.address, epoch=decode.epoch, fingerprint="0")
    wrong = {
        Reason.KV_NOT_FOUND: (good, 0),  # never cached there, or evicted since
        Reason.EPOCH_CHANGED: (restarted, 0),
        Reason.LAYOUT_MISMATCH: (other, 0),
        Reason.WORKER_LOST: (lost, 0),
        Reason.INVALID_ARGUMENT: (good, 7),
    }
    async with FakeLink(prefill) as link:
        for reason, (worker, replica) in wrong.items():
            before = await failures(prefill, reason)
            r = request(prompt_of(200))
            link.submit(r, prefill_pb2.KvPrefixRef(worker=worker, replica=replica, num_pages=3))
            first = await link.first(r)
            assert list(first.token_ids) == expected(list(r.token_ids), 1) and first.cached_tokens == 0
            assert await failures(prefill, reason) == before + 1
            link.abort(r)
        await prefill.whole()
    await decode.whole()


@contextlib.asynccontextmanager
async def offered(prefill: Worker, prefix_source: Worker) -> AsyncIterator[Waiting]:
    """A link, a request that waits in the queue with a prefix fetch, and a call that lets the queue go on."""
    history = prompt_of(FETCHED)
    await cache(prefix_source, history)
    async with FakeLink(prefill) as link:
        held = await link.begun(request(prompt_of(HELD)))
        r = request([*history[:-1], 7, 8])
        link.submit(r, await prefix(prefix_source, 100))
        await until(prefix_source, "the prefix fetch", lambda load: load.pages_published == FETCHED // PAGE - 1)
        await until(prefill, "the queue", lambda load: load.waiting == 1)
        yield link, r, lambda: link.abort(held)


async def computed(prefill: Worker, link: FakeLink, r: worker_pb2.EngineRequest, cached_tokens: int) -> None:
    first = await link.first(r)
    assert list(first.token_ids) == expected(list(r.token_ids), 1) and first.cached_tokens == cached_tokens
    link.abort(r)
    await until(prefill, "the abort", lambda load: not load.exporting)


@pytest.mark.long
async def test_prefix_fetch_offered_survives_abort_freeze_and_drain(tmp_path: Path) -> None:
    """An abort, a source that freezes, and one that drains."""
    async with workers(tmp_path, "prefill", "decode", sets=TIGHT, patient=True) as (prefill, prefix_source):
        async with offered(prefill, prefix_source) as (link, r, go_on):
            link.abort(r)
            await link.finish(r)
            await prefix_source.whole()
            go_on()
            await prefill.whole()
        assert await failures(prefill, Reason.CANCELLED) == 1

        async with offered(prefill, prefix_source) as (link, r, go_on):
            for process in prefix_source.family():
                process.suspend()
            go_on()
            await computed(prefill, link, r, 0)
            resumed(prefix_source)
        await until_counted(lambda: failures(prefill, Reason.STALLED), 1)  # counted once the reads are final
        await prefill.whole()
        await prefix_source.whole()

        ref = await prefix(prefix_source, 1)
        async with offered(prefill, prefix_source) as (link, r, go_on):
            prefix_source.process.send(signal.SIGTERM)
            await prefix_source.until(lambda: "SIGTERM: draining" in prefix_source.process.log_tail(), "the drain")
            refused = request(prompt_of(70))
            link.submit(refused, ref)
            await until_counted(lambda: failures(prefill, Reason.DRAINING), 1)
            go_on()
            await link.first(refused)
            link.abort(refused)
            await computed(prefill, link, r, FETCHED - PAGE)
        assert await asyncio.wait_for(prefix_source.process.wait(), HANG_S) == 0
        await prefill.whole()


def resumed(worker: Worker) -> None:
    for process in worker.family():
        process.resume()


@pytest.mark.long
async def test_prefix_source_killed_costs_only_the_prefix_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix_fetches, "OFFER_S", PATIENCE_S)
    async with (
        inside("prefill", sets=TIGHT) as [prefill],
        workers(tmp_path, "unified", sets=TIGHT) as [prefix_source],
        offered(prefill, prefix_source) as (link, r, go_on),
    ):
        prefix_source.process.send(signal.SIGKILL)
        await until_counted(lambda: failures(prefill, Reason.WORKER_LOST), 1)
        go_on()
        await computed(prefill, link, r, 0)
        await prefill.whole()
