"""Prompts computed on one worker and continued on another, with the simulated engine and NIXL between them. Workers
that are killed or stopped are processes, and so is the decode worker of the fixture `pair`; the others run in this one.

Every test ends with both pools whole: no page is lost whatever happens to a request.
"""

import asyncio
import contextlib
import itertools
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio
from millrace.v1 import common_pb2, kv_pb2, kv_pb2_grpc, prefill_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import from_rpc_error
from millrace_serve.handover.failed_reads import LIMIT
from millrace_testing import HANG_S
from millrace_testing.fake_router import FakeLink, FakePair, request
from millrace_testing.inside import Inside, inside
from millrace_testing.procs import SIM, Worker, gone, workers
from millrace_testing.shared import shared
from millrace_testing.sim import expected, prompt_of

ABORT, ERROR = common_pb2.FINISH_REASON_ABORT, common_pb2.FINISH_REASON_ERROR
PATIENT = (*SIM, "timeouts={stall: 600}")  # on a busy machine nothing may be said for seconds
SLOW = (*PATIENT, "sim={token_s: 0.001}", "limits.max_prefill_tokens=64")  # a prompt of 8000 tokens: 125 chunks, 8 s
SHORT_LEASE = "timeouts={lease: 0.1, stall: 5.0}"
IMPATIENT = "timeouts={stall: 0.5}"


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Worker]]:
    """A prefill and a decode worker for all tests that leave them as they found them."""
    folder = tmp_path_factory.mktemp("pair")
    async with inside("prefill", sets=PATIENT) as [prefill], workers(folder, "decode", sets=PATIENT) as [decode]:
        yield [prefill, decode]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def impatient(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[list[Worker]]:
    """As `pair`, slow to compute and quick to give up."""
    folder, sets = tmp_path_factory.mktemp("impatient"), (*SLOW, IMPATIENT)
    async with workers(folder, "prefill", sets=sets) as [prefill], inside("decode", sets=sets) as [decode]:
        yield [prefill, decode]


slow = shared(lambda: inside("prefill", "decode", sets=SLOW))


async def until_metric(worker: Worker, name: str, value: float, **labels: str) -> None:
    while await worker.metric(name, **labels) < value:
        await asyncio.sleep(0.02)


async def whole(*both: Worker) -> None:
    for worker in both:
        await worker.whole()


async def test_prompts_through_both_workers_give_the_oracles_tokens(pair: list[Worker]) -> None:
    prefill, decode = pair
    async with FakePair(prefill, decode) as both:
        prompts = [prompt_of(length) for length in (1, 63, 64, 65, 500, 3000)] * 2  # again from the prefix cache
        requests = [both.submit(request(prompt, max_tokens=8, logprobs=1)) for prompt in prompts]
        await asyncio.gather(*(both.to_decode.finish(r) for r in requests))
        for r, prompt in zip(requests, prompts, strict=True):
            assert both.to_decode.tokens(r) == expected(prompt, 8)
            assert sum(len(output.logprobs) for output in both.to_decode.of(r)) == 8
            [first] = both.to_prefill.of(r)
            assert first.finish_reason == 0 and list(first.token_ids) == expected(prompt, 1)
    await whole(prefill, decode)
    assert await decode.metric("millrace_kv_transfer_seconds_count") == len(requests)
    assert await decode.metric("millrace_kv_bytes_total") > 0
    assert await prefill.metric("millrace_leases_ended_total", outcome="released") == len(requests)


async def test_prompt_that_ends_with_its_first_token_ends_on_both_sides(pair: list[Worker]) -> None:
    prefill, decode = pair
    async with FakePair(prefill, decode) as both:
        r = both.submit(request(prompt_of(100), max_tokens=1))
        for link in (both.to_prefill, both.to_decode):
            assert (await link.finish(r)).finish_reason == common_pb2.FINISH_REASON_LENGTH
            assert link.tokens(r) == expected(list(r.token_ids), 1)
    await whole(prefill, decode)


async def test_warmup_of_a_pair_moves_a_prompt_or_says_why_not(pair: list[Worker]) -> None:
    """Each time: another router asks for it."""
    prefill, decode = pair
    source, moved = await prefill.source(), await decode.metric("millrace_kv_transfer_seconds_count")
    for times in (1, 2):
        await decode.stub.Warmup(worker_pb2.WarmupRequest(source=source), timeout=HANG_S)
        assert list((await decode.info()).warmed_sources) == [prefill.epoch]
        assert await decode.metric("millrace_kv_transfer_seconds_count") == moved + times
    for reason, change in (
        (Reason.LAYOUT_MISMATCH, {"fingerprint": "0"}),
        (Reason.EPOCH_CHANGED, {"epoch": "0"}),
        (Reason.WORKER_LOST, {"address": "127.0.0.1:1"}),
    ):
        wrong = {"address": source.address, "epoch": source.epoch, "fingerprint": source.fingerprint, **change}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decode.stub.Warmup(worker_pb2.WarmupRequest(source=wrong), timeout=HANG_S)
        assert from_rpc_error(caught.value).reason is reason
    await whole(prefill, decode)


async def test_fetch_that_cannot_be_fails_with_its_reason(impatient: list[Worker]) -> None:
    prefill, decode = impatient
    source = await prefill.source()
    sources = {
        Reason.KV_NOT_FOUND: source,  # nobody submits it there
        Reason.EPOCH_CHANGED: worker_pb2.KvSourceRef(address=source.address, epoch="0", fingerprint=source.fingerprint),
        Reason.LAYOUT_MISMATCH: worker_pb2.KvSourceRef(address=source.address, epoch=source.epoch, fingerprint="0"),
        Reason.WORKER_LOST: worker_pb2.KvSourceRef(address="127.0.0.1:1", epoch="0", fingerprint=source.fingerprint),
    }
    async with FakeLink(decode) as to_decode:
        requests = {reason: request(prompt_of(100)) for reason in sources}
        for reason, r in requests.items():
            to_decode.submit(r, sources[reason])
        for reason, r in requests.items():
            end = await to_decode.finish(r)
            assert end.finish_reason == ERROR and end.failure.reason == reason, end
    await whole(decode)


async def test_abort_at_every_stage_reaches_the_other_side(slow: list[Inside]) -> None:
    prefill, decode = slow
    failed = await decode.metric("millrace_kv_failures_total", reason="CANCELLED")
    async with FakePair(prefill, decode) as both:
        # on P while it computes: D hears it through Fetch
        r = both.submit(request(prompt_of(8000)))
        await until_metric(prefill, "millrace_leases", 1)  # the first chunk is out
        both.to_prefill.abort(r)
        assert (await both.to_prefill.finish(r)).finish_reason == ABORT
        assert (await both.to_decode.finish(r)).failure.reason == Reason.CANCELLED
        await until_metric(decode, "millrace_kv_failures_total", failed + 1, reason="CANCELLED")  # once it is final
        # on D while P computes and a chunk has come: D gives the pages back, and P stops
        num_bytes = await decode.metric("millrace_kv_bytes_total")
        r = both.submit(request(prompt_of(8000)))
        await until_metric(decode, "millrace_kv_bytes_total", num_bytes + 1)
        both.to_decode.abort(r)
        assert (await both.to_decode.finish(r)).finish_reason == ABORT
        assert (await both.to_prefill.finish(r)).finish_reason == ERROR
        # held on P, and nobody fetches it
        r = await both.to_prefill.begun(request(prompt_of(100)))
        await until_metric(prefill, "millrace_leases", 1)
        both.to_prefill.abort(r)
        await prefill.whole()
        assert await prefill.metric("millrace_leases") == 0
        # decoding
        r = both.submit(request(prompt_of(100), max_tokens=8000))
        await both.to_decode.first(r)
        both.to_decode.abort(r)
        assert (await both.to_decode.finish(r)).finish_reason == ABORT
    await whole(prefill, decode)


@pytest.mark.parametrize("how", ["pause", "link"])
async def test_prompt_dropped_by_its_worker_fails_with_a_retry(slow: list[Inside], how: str) -> None:
    """On both sides: the decode worker's word may reach the router first."""
    prefill, decode = slow
    num_bytes = await decode.metric("millrace_kv_bytes_total")
    async with FakePair(prefill, decode) as both:
        r = both.submit(request(prompt_of(8000)))
        await until_metric(decode, "millrace_kv_bytes_total", num_bytes + 1)
        if how == "link":
            both.to_prefill.drop()
        else:
            action = worker_pb2.WEIGHTS_ACTION_PAUSE
            await prefill.stub.SetWeights(worker_pb2.SetWeightsRequest(action=action, drop=True), timeout=HANG_S)
            assert (await both.to_prefill.finish(r)).failure.reason == Reason.NOT_READY
        assert (await both.to_decode.finish(r)).failure.reason == Reason.NOT_READY
    if how == "pause":
        await prefill.stub.SetWeights(worker_pb2.SetWeightsRequest(action=worker_pb2.WEIGHTS_ACTION_RESUME))
    await whole(prefill, decode)


async def test_prompt_cut_off_by_a_drain_fails_on_both_sides(pair: list[Worker]) -> None:
    _, decode = pair
    async with inside("prefill", sets=SLOW) as [prefill], FakePair(prefill, decode) as both:
        num_bytes = await decode.metric("millrace_kv_bytes_total")
        r = both.submit(request(prompt_of(8000)))
        await until_metric(decode, "millrace_kv_bytes_total", num_bytes + 1)
        await prefill.stub.Drain(worker_pb2.DrainRequest(timeout_s=0.01), timeout=HANG_S)
        for link in (both.to_prefill, both.to_decode):
            assert (await link.finish(r)).failure.reason == Reason.DRAINING
        await whole(prefill, decode)


async def test_attempt_submitted_again_is_refused(pair: list[Worker]) -> None:
    prefill, _ = pair
    async with FakeLink(prefill) as link:
        r = await link.begun(request(prompt_of(100)))
        link.submit(r)
        assert "submitted here before" in (await link.finish(r)).failure.message
        link.abort(r)
        await prefill.whole()


async def test_short_leases_end_behind_lost_routers_and_stalled_readers(pair: list[Worker]) -> None:
    _, decode = pair
    async with inside("prefill", sets=(*SLOW, SHORT_LEASE)) as [prefill]:
        async with FakePair(prefill, decode) as both:
            for length in (50, 100, 4000):
                both.submit(request(prompt_of(length), max_tokens=8000))
            await until_metric(prefill, "millrace_leases", 1)
        await whole(prefill, decode)
        expired = await prefill.metric("millrace_leases_ended_total", outcome="expired")
        async with FakePair(prefill, decode) as both:
            [rank] = decode.ranks()
            rank.suspend()
            r = both.submit(request(prompt_of(300)))
            await until_metric(prefill, "millrace_leases_ended_total", expired + 1, outcome="expired")
            rank.resume()
            assert (await both.to_decode.finish(r)).failure.reason == Reason.KV_EXPIRED
            await until_metric(decode, "millrace_kv_failures_total", 1, reason="KV_EXPIRED")  # counted once it is final
        await whole(prefill, decode)


async def killed_in_a_prompt(prefill: Worker, decode: Worker) -> None:
    """The import fails, and the prefill worker ends with all of its processes."""
    family = prefill.family()
    async with FakePair(prefill, decode) as both:
        r = both.submit(request(prompt_of(8000)))
        await until_metric(decode, "millrace_sequences", 1, doing="importing")
        prefill.process.send(signal.SIGKILL)
        end = await both.to_decode.finish(r)
        assert end.finish_reason == ERROR
        assert end.failure.reason in (Reason.WORKER_LOST, Reason.TRANSFER_FAILED)
        await both.to_prefill.end()
        assert await prefill.process.wait() == -9
    await gone(family)
    await decode.whole()


async def test_prefill_that_freezes_stalls_the_import(impatient: list[Worker]) -> None:
    prefill, decode = impatient
    async with FakePair(prefill, decode) as both:
        r = both.submit(request(prompt_of(8000)))
        await until_metric(decode, "millrace_sequences", 1, doing="importing")
        prefill.process.send(signal.SIGSTOP)
        try:
            assert (await both.to_decode.finish(r)).failure.reason == Reason.STALLED
        finally:
            prefill.process.send(signal.SIGCONT)
        both.to_prefill.abort(r)
    await whole(prefill, decode)


async def test_prefill_restarted_at_its_address_is_another_worker(pair: list[Worker], tmp_path: Path) -> None:
    _, decode = pair
    async with workers(tmp_path, "prefill", sets=SLOW) as [prefill]:
        old = await prefill.source()
        await killed_in_a_prompt(prefill, decode)
    async with inside("prefill", sets=(*SIM, f"grpc_port={old.address.rpartition(':')[2]}")) as [again]:
        async with FakePair(again, decode) as both:
            stale = request(prompt_of(300))
            both.to_decode.submit(stale, old)
            assert (await both.to_decode.finish(stale)).failure.reason in (Reason.EPOCH_CHANGED, Reason.WORKER_LOST)
            fresh = both.submit(request(prompt_of(300)))
            await both.to_decode.finish(fresh)
            assert both.to_decode.tokens(fresh) == expected(list(fresh.token_ids), 8)
        await whole(again, decode)


async def test_fetch_twice_gives_the_same_pages_until_the_release(pair: list[Worker]) -> None:
    """A second decode worker takes over when the first one died before it released."""
    prefill, _ = pair
    async with FakeLink(prefill) as link:
        source = await prefill.source()
        stub = kv_pb2_grpc.KvServiceStub(prefill.channel)
        r = request(prompt_of(200))
        fetch = kv_pb2.FetchOpen(id=r.id, epoch=source.epoch, fingerprint=source.fingerprint)

        async def pages(release: bool = False) -> tuple[list[int], bool]:
            """Of one Fetch, up to its last chunk or its end; whether they were held."""
            call, found, held = stub.Fetch(timeout=HANG_S), [], False
            await call.write(kv_pb2.FetchRequest(open=fetch))
            async for response in call:
                found += response.chunk.page_ids
                held |= response.HasField("release_confirmed")
                if response.chunk.last:
                    if not release:
                        call.cancel()
                        break
                    await call.write(kv_pb2.FetchRequest(release=kv_pb2.FetchRelease()))
            return found, held

        early = asyncio.create_task(pages())
        link.submit(r)
        found, held = await early
        assert len(found) == 4 and not held
        assert await pages() == (found, False)
        assert await pages(release=True) == (found, True)
        await prefill.whole()
        for opening in (kv_pb2.FetchRequest(open=fetch), kv_pb2.FetchRequest(release=kv_pb2.FetchRelease())):
            with pytest.raises(Exception) as caught:
                call = stub.Fetch(timeout=HANG_S)
                await call.write(opening)
                async for _ in call:
                    pass
            reason = from_rpc_error(caught.value).reason  # type: ignore[arg-type]
            assert reason is (Reason.KV_NOT_FOUND if opening.HasField("open") else Reason.INVALID_ARGUMENT)


@pytest.mark.parametrize("path", ["PrefillService/Link", "KvService/Fetch", "WorkerService/Warmup"])
async def test_message_malformed_is_refused_at_any_place_of_a_call(
    pair: list[Worker], path: str, caplog: pytest.LogCaptureFixture
) -> None:
    """At the beginning of a call, and later: some calls look at the next message only when a wait has ended."""
    prefill, _ = pair
    first = {
        "PrefillService/Link": prefill_pb2.PrefillLinkRequest(hello={"router_id": "r", "epoch": prefill.epoch}),
        "KvService/Fetch": kv_pb2.FetchRequest(
            open=kv_pb2.FetchOpen(id={"room": 5}, epoch=prefill.epoch, fingerprint=(await prefill.source()).fingerprint)
        ),
    }.get(path)

    async def refused(*messages: bytes) -> None:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            if first is None:
                await prefill.channel.unary_unary(f"/millrace.v1.{path}")(messages[0], timeout=HANG_S)
            else:
                call = prefill.channel.stream_stream(f"/millrace.v1.{path}")(timeout=HANG_S)
                for message in messages:
                    await call.write(message)
                while await call.read() is not grpc.aio.EOF:
                    pass
        error = from_rpc_error(caught.value)
        assert error.reason is Reason.INVALID_ARGUMENT and "not well-formed" in error.message

    bad = (b"\xff", b"\n\x04\x12\x02\xff\xfe", b"\x12")  # wire type, UTF-8, length
    await asyncio.gather(*map(refused, bad), *(refused(first.SerializeToString(), one) for one in bad if first))
    assert "Traceback" not in caplog.text


async def test_worker_whose_pages_nobody_can_read_ends(pair: list[Worker]) -> None:
    """Two readers say so, one attempt after the other."""
    _, decode = pair
    async with inside("prefill") as [prefill]:
        leaving = prefill.process.frontend.leaving
        async with FakePair(prefill, decode) as both:
            source = await prefill.source()
            stub = kv_pb2_grpc.KvServiceStub(prefill.channel)
            for index in itertools.count():
                if leaving.done():
                    break
                r = request(prompt_of(200 + index))
                both.to_prefill.submit(r)
                call = stub.Fetch(timeout=HANG_S)
                opening = kv_pb2.FetchOpen(id=r.id, epoch=source.epoch, fingerprint=source.fingerprint)
                report = kv_pb2.ReadFailed(reader=f"reader {index % 2}", error="no route")
                with contextlib.suppress(grpc.aio.AioRpcError):  # it ends meanwhile
                    await call.write(kv_pb2.FetchRequest(open=opening))
                    while (response := await call.read()).WhichOneof("message") != "source":
                        assert response.HasField("heartbeat")
                    await call.write(kv_pb2.FetchRequest(failed=report))
                    await call.read()
                call.cancel()
                both.to_prefill.abort(r)
        assert f"failed {LIMIT} times in a row" in leaving.result()
        assert await asyncio.wait_for(prefill.process.wait(), HANG_S) == 1


async def test_drain_with_held_prompts_waits_for_their_readers(pair: list[Worker]) -> None:
    _, decode = pair
    async with inside("prefill") as [prefill]:
        async with FakePair(prefill, decode) as both:
            r = await both.to_prefill.begun(request(prompt_of(200)))
            prefill.process.send(signal.SIGTERM)
            while (await prefill.info()).state != worker_pb2.WORKER_STATE_DRAINING:
                await asyncio.sleep(0.01)
            both.to_decode.submit(r, both.source)
            await both.to_decode.finish(r)
            assert both.to_decode.tokens(r) == expected(list(r.token_ids), 8)
        assert await asyncio.wait_for(prefill.process.wait(), HANG_S) == 0
        await decode.whole()


# ---------------------------------------------------------------------------------------------- flexible workers


# In so small pools prompts wait for the other worker's reads.
TIGHT = (*PATIENT, "limits={num_pages: 41, max_model_len: 2048, max_running: 8, max_prefill_tokens: 256}")
flexible = shared(lambda: inside("flexible", "flexible", sets=TIGHT))


async def test_flexible_workers_hand_over_both_ways_and_run_prompts_alone(flexible: list[Inside]) -> None:
    one, other = flexible
    for sink, source in ((one, other), (other, one)):
        await sink.stub.Warmup(worker_pb2.WarmupRequest(source=await source.source()), timeout=HANG_S)
        assert list((await sink.info()).warmed_sources) == [source.epoch]
    async with FakePair(one, other) as there, FakePair(other, one) as back:
        pairs, alone = [], []
        for index in range(24):
            for way in (there, back):
                r = request(prompt_of(50 + 40 * index), max_tokens=8)
                pairs.append((way.to_decode, way.submit(r)))
                alone.append((way.to_decode, request(prompt_of(60 + 20 * index), max_tokens=100)))
                way.to_decode.submit(alone[-1][1])
        for link, r in pairs + alone:
            await link.finish(r)
            assert link.tokens(r) == expected(list(r.token_ids), r.sampling.max_tokens)
    await whole(one, other)
    for worker in flexible:
        assert await worker.metric("millrace_leases_ended_total", outcome="released") >= 24
        assert await worker.metric("millrace_leases_ended_total", outcome="expired") == 0


async def test_flexible_worker_fetches_prefix_a_prefix(flexible: list[Inside], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace_serve.handover.prefix_fetches.OFFER_S", HANG_S)  # a collection here takes longer
    prefix_source, fetcher = flexible
    prompt = prompt_of(700)
    async with FakePair(fetcher, prefix_source) as pair:
        first = request(prompt, max_tokens=4)
        pair.to_decode.submit(first)
        await pair.to_decode.finish(first)
        fetched = await fetcher.metric("millrace_prefix_fetch_pages_total", direction="fetched")
        r = request([*prompt, *prompt_of(20)], max_tokens=4)
        prefix = prefill_pb2.KvPrefixRef(worker=await prefix_source.source(), num_pages=10)
        pair.to_decode.submit(r, pair.source)
        pair.to_prefill.export(r, prefix)
        await pair.to_decode.finish(r)
        assert pair.to_decode.tokens(r) == expected(list(r.token_ids), 4)
        assert await fetcher.metric("millrace_prefix_fetch_pages_total", direction="fetched") == fetched + 10
    await whole(prefix_source, fetcher)


async def test_duty_and_routers_are_told_at_once(flexible: list[Inside]) -> None:
    worker = flexible[0]
    watch = worker.stub.WatchLoad(worker_pb2.WatchLoadRequest(min_interval_ms=1, max_interval_ms=600_000))

    async def until(routers: list[str], duty: int) -> None:
        while [*(load := await watch.read()).routers, load.duty] != [*routers, duty]:
            pass

    await until([], worker_pb2.DUTY_UNSPECIFIED)
    async with FakeLink(worker, router_id="b"), FakeLink(worker, router_id="a"):
        await until(["a", "b"], worker_pb2.DUTY_UNSPECIFIED)
        for duty in (worker_pb2.DUTY_PREFILL, worker_pb2.DUTY_DECODE, worker_pb2.DUTY_BOTH):
            await worker.stub.SetDuty(worker_pb2.SetDutyRequest(duty=duty, router_id="a", why="a test"), timeout=HANG_S)
            await until(["a", "b"], duty)
    await until([], worker_pb2.DUTY_BOTH)
    watch.cancel()


@pytest.mark.parametrize(("index", "duty"), [(0, worker_pb2.DUTY_UNSPECIFIED), (0, 9), (1, worker_pb2.DUTY_BOTH)])
async def test_duty_that_cannot_be_is_refused(
    flexible: list[Inside], pair: list[Worker], index: int, duty: worker_pb2.Duty
) -> None:
    worker = (flexible[0], pair[1])[index]
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await worker.stub.SetDuty(worker_pb2.SetDutyRequest(duty=duty), timeout=HANG_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "duty" in str(caught.value.details())


async def test_only_flexible_workers_take_prompts_for_others(pair: list[Worker]) -> None:
    async with FakeLink(pair[1]) as link:
        r = request(prompt_of(10))
        link.export(r)
        assert (await link.finish(r)).failure.reason == Reason.INVALID_ARGUMENT
    await whole(pair[1])
