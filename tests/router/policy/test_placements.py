"""Policies in a running router: sessions, feeds of prefix caches, local prefill, and questions afterwards."""

import asyncio
from collections.abc import Callable

import grpc
import pytest
from millrace.v1 import admin_pb2, worker_pb2
from millrace_common.deployment_secret import cache_salt
from millrace_common.page_hash import page_hashes
from millrace_router.policy import placer
from router.fake_worker import CONTEXT, DECODE, PREFILL, UNIFIED, FakeWorker, expected
from router.harness import Cluster

PAGE = 4
PROMPT = list(range(64, 84))  # 5 pages
BLOCKS = page_hashes(PROMPT, PAGE, salt=cache_salt(b"", ""))  # of callers without a key


class Caching(FakeWorker):
    """Says what a test puts into `says`; every stream starts with all of `snapshot`."""

    def __init__(self, role: int, **fields: object) -> None:
        super().__init__(role, **fields)
        self.snapshot: list[bytes] = []
        self.sequence = 0
        self.streams: list[asyncio.Queue[worker_pb2.CacheChange]] = []

    async def GetInfo(self, request, context):
        info = await super().GetInfo(request, context)
        info.layout.page_size = PAGE
        return info

    async def WatchCache(self, request, context):
        says: asyncio.Queue[worker_pb2.CacheChange] = asyncio.Queue()
        self.streams.append(says)
        first = worker_pb2.CacheChange(sequence=self.sequence, after=self.sequence, stored=self.snapshot, snapshot=True)
        yield worker_pb2.CacheChanges(epoch=self.epoch, changes=[first])
        while True:
            yield worker_pb2.CacheChanges(epoch=self.epoch, changes=[await says.get()])

    def say(self, after: int, sequence: int, stored: list[bytes], replica: int = 0) -> None:
        change = worker_pb2.CacheChange(after=after, sequence=sequence, stored=stored, replica=replica)
        self.streams[-1].put_nowait(change)


async def ways(cluster: Cluster, request_id: str) -> list[admin_pb2.PlacementDecision]:
    answer = await cluster.admin.ExplainRequest(admin_pb2.ExplainRequestRequest(request_id=request_id))
    return list(answer.placements)


# ------------------------------------------------------------------------------------- sessions


async def test_a_session_stays_where_it_is(cluster: Callable) -> None:
    made = await cluster(*(FakeWorker(UNIFIED) for _ in range(4)), decode_policy="session")
    homes = set()
    for name in ("a", "b", "c", "d", "e", "f"):
        before = [len(worker.submitted) for worker in made.workers]
        for _ in range(3):
            await made.settled()
            result = await made.generate(PROMPT, session_id=name)
            assert result.tokens() == expected(PROMPT, 8)
        body = {"prompt": PROMPT, "max_tokens": 2, "user": "somebody else"}
        answer = await made.http.post("/v1/completions", json=body, headers={"x-session-id": name})
        assert answer.status_code == 200
        answer = await made.http.post("/v1/completions", json={**body, "prompt_cache_key": name})
        assert answer.status_code == 200
        added = [len(worker.submitted) - count for worker, count in zip(made.workers, before, strict=True)]
        assert sorted(added) == [0, 0, 0, 5]
        homes.add(added.index(5))
    assert len(homes) > 1


# ------------------------------------------------------------------------------------- prefix caches


async def test_the_router_remembers_whom_it_sent_a_prefix(cluster: Callable) -> None:
    made = await cluster(*(Caching(UNIFIED) for _ in range(3)), decode_policy="prefix_aware")
    await made.generate(PROMPT, request_id="first")
    home = next(worker for worker in made.workers if worker.submitted)
    for tail in range(5):
        await made.settled()
        await made.generate([*PROMPT, 64 + tail], request_id=f"again {tail}")
    assert len(home.submitted) == 6
    assert [placement.cached_tokens for placement in await ways(made, "first")] == [0]
    assert [placement.cached_tokens for placement in await ways(made, "again 4")] == [20]
    assert made.metric("millrace_expected_cached_tokens_total") == 5 * 20
    assert not any(worker.streams for worker in made.workers), "nobody asked for feeds"


async def kv_cluster(cluster: Callable) -> Cluster:
    workers = [Caching(UNIFIED), Caching(UNIFIED)]
    made = await cluster(*workers, decode_policy="kv_aware")
    await made.until(lambda: made.metric("millrace_cache_snapshots_total") == 2)
    return made


async def goes_to(made: Cluster, tail: int) -> FakeWorker:
    """Who gets a prompt that begins like PROMPT, three times."""
    counts = [len(worker.submitted) for worker in made.workers]
    for _ in range(3):
        await made.settled()
        await made.generate([*PROMPT, 64 + tail])
    added = [len(worker.submitted) - count for worker, count in zip(made.workers, counts, strict=True)]
    assert sorted(added) == [0, 3]
    return made.workers[added.index(3)]


def known(made: Cluster, worker: FakeWorker) -> int:
    index = made.router.registry.placer.indexes.kv
    return index.lookup(BLOCKS).get((worker.epoch, 0), 0)


async def test_requests_go_to_whoever_says_that_it_has_the_prefix(cluster: Callable) -> None:
    made = await kv_cluster(cluster)
    a, b = made.workers
    b.say(0, 1, BLOCKS[:4])
    await made.until(lambda: known(made, b) == 4)
    assert await goes_to(made, 1) is b
    a.say(0, 1, BLOCKS)
    await made.until(lambda: known(made, a) == 5)
    assert await goes_to(made, 2) is a


@pytest.mark.parametrize("replica", [0, 1, 2**32 - 1])
async def test_after_a_gap_the_index_is_made_from_a_new_snapshot(cluster: Callable, replica: int) -> None:
    """And after a change of a replica that the worker does not have."""
    made = await kv_cluster(cluster)
    a, _ = made.workers
    a.snapshot, a.sequence = BLOCKS[:3], 7
    a.say(6, 7, BLOCKS[2:3], replica)
    await made.until(lambda: made.metric("millrace_cache_snapshots_total") == 3)
    assert made.metric("millrace_cache_gaps_total") == (0 if replica else 1)
    assert known(made, a) == 3 and len(a.streams) == 2
    a.say(7, 8, BLOCKS[3:4])
    await made.until(lambda: known(made, a) == 4)


async def test_a_message_that_cannot_be_read_breaks_the_feed_like_a_gap(
    cluster: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await kv_cluster(cluster)
    a, _ = made.workers
    index = made.router.registry.placer.indexes.kv
    a.snapshot, a.sequence = BLOCKS[:3], 7
    with monkeypatch.context() as patch:
        patch.setattr(index, "apply", lambda holder, change: 1 // 0)
        a.say(0, 1, BLOCKS)
        await made.until(lambda: known(made, a) == 0 and (a.epoch, 0) not in index._sequences)
    await made.until(lambda: known(made, a) == 3)
    assert len(a.streams) == 2


async def test_a_restarted_worker_has_nothing_until_it_says_so(cluster: Callable) -> None:
    made = await kv_cluster(cluster)
    a, _ = made.workers
    old = a.epoch
    a.say(0, 1, BLOCKS)
    await made.until(lambda: known(made, a) == 5)
    a.snapshot = BLOCKS[:2]
    await a.restart()
    await made.until(lambda: known(made, a) == 2)
    index = made.router.registry.placer.indexes.kv
    assert (old, 0) not in index.lookup(BLOCKS)
    await made.until(lambda: made.metric("millrace_cache_feeds") == 2)
    await a.stop()
    await made.until(lambda: made.metric("millrace_cache_feeds") == 1)


async def test_workers_that_say_nothing_are_served_all_the_same(cluster: Callable) -> None:
    made = await cluster(FakeWorker(UNIFIED), Caching(UNIFIED), decode_policy="kv_aware")
    for _ in range(2):
        assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)


# ------------------------------------------------------------------------------------- prompts on decode workers


async def test_short_prompts_are_run_by_the_decode_worker(cluster: Callable) -> None:
    """Beside its stream, the limit leaves time for 11 prompt tokens in a step."""
    prefill, decode = Caching(PREFILL), Caching(DECODE)
    for worker in (prefill, decode):
        worker.counts = {"step_times": worker_pb2.StepTimes(fixed_s=0.1, token_s=0.001)}
    decode.counts["running"] = 1
    made = await cluster(prefill, decode, routing={"slo": {"tpot": 0.117}})
    await made.until(lambda: len(made.router.registry.warmups.ready) == 1)  # the decode worker alone is ready before
    short, long = PROMPT[10:], PROMPT  # no common prefix: a page of the short one would make the long one short, too
    assert (await made.generate(short, request_id="short")).tokens() == expected(short, 8)
    assert not prefill.submitted and decode.sources == [None]
    await made.settled()
    assert (await made.generate(long, request_id="long")).tokens() == expected(long, 8)
    assert len(prefill.submitted) == 1 and decode.sources[1].epoch == prefill.epoch
    again = [*long, 70]  # 20 of its 21 tokens are known to be there now
    await made.settled()
    assert (await made.generate(again, request_id="again")).tokens() == expected(again, 8)
    assert len(prefill.submitted) == 1 and decode.sources[2] is None
    assert [(await ways(made, name))[0].route for name in ("short", "long", "again")] == ["local", "pair", "local"]
    labels = {"prefill_policy": "least_loaded", "decode_policy": "least_loaded"}
    assert made.metric("millrace_placements_total", route="local", **labels) == 2
    await made.quiet()


# ------------------------------------------------------------------------------------- questions


async def test_every_attempt_of_every_continuation_can_be_explained(cluster: Callable) -> None:
    workers = [FakeWorker(PREFILL), FakeWorker(PREFILL, capacity=0), FakeWorker(DECODE)]
    made = await cluster(*workers, prefill_policy="round_robin")
    await made.generate(PROMPT, n=2, request_id="r")
    found = await ways(made, "r")
    assert [placement.route for placement in found] == ["pair", "pair"]
    prefill, decode = found[0].selections
    assert (prefill.role, prefill.policy, decode.policy) == ("prefill", "round_robin", "least_loaded")
    by_address = {row.address: row for row in prefill.candidates}
    assert by_address[workers[0].address].chosen
    assert by_address[workers[1].address].excluded == "no capacity"
    assert [row.chosen for row in decode.candidates] == [True] and list(decode.candidates[0].score) == [0.0, 0.0]


async def test_only_the_latest_are_remembered(cluster: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placer, "REMEMBERED", 2)
    made = await cluster(FakeWorker(UNIFIED))
    for name in ("one", "two", "three"):
        await made.generate([CONTEXT % 200], request_id=name)
    assert await ways(made, "three") and await ways(made, "two")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ways(made, "one")
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
