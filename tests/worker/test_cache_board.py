"""WatchCache: a snapshot, then differences, whose sequence numbers follow each other."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Collection
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

from millrace.v1 import worker_pb2
from millrace_common.page_hash import page_hashes
from millrace_serve.engine.core import CacheChange
from millrace_serve.worker.frontend.cache_board import CHUNK, CacheBoard
from millrace_serve.worker.frontend.frontend import Frontend
from millrace_testing.blocks import blocks
from millrace_testing.fake_router import FakeLink, request
from millrace_testing.inside import Inside, inside

Messages = AsyncIterator[worker_pb2.CacheChanges]


class Mirror:
    """A watcher that holds every message against the rules."""

    def __init__(self) -> None:
        self.blocks: dict[int, set[bytes]] = {}
        self.host: dict[int, set[bytes]] = {}
        self.sequences: dict[int, int] = {}

    def take(self, message: worker_pb2.CacheChanges) -> None:
        for change in message.changes:
            if change.snapshot:
                self.blocks[change.replica], self.host[change.replica] = set(), set()
            else:
                assert change.after == self.sequences[change.replica]
            apply(self.blocks[change.replica], change.stored, change.removed)
            apply(self.host[change.replica], change.host_stored, change.host_removed)
            self.sequences[change.replica] = change.sequence

    async def until(self, messages: Messages, sequences: dict[int, int]) -> None:
        while self.sequences != sequences:
            self.take(await anext(messages))


def apply(held: set[bytes], stored: Collection[bytes], removed: Collection[bytes]) -> None:
    assert set(removed) <= held and not set(stored) & held
    held -= set(removed)
    held |= set(stored)


async def test_snapshot_of_every_replica_then_what_changes() -> None:
    board, mirror = CacheBoard(2, "e"), Mirror()
    board.update(1, CacheChange(blocks(1, 2, 3), []))
    messages = board.watch(0.0)
    await mirror.until(messages, {0: 0, 1: 1})
    assert mirror.blocks == {0: set(), 1: set(blocks(1, 2, 3))}
    board.update(0, CacheChange(blocks(7), []))
    board.update(1, CacheChange(blocks(4), blocks(3)))
    await mirror.until(messages, {0: 1, 1: 2})
    assert mirror.blocks == {0: set(blocks(7)), 1: set(blocks(1, 2, 4))}
    await messages.aclose()


async def test_tiers_are_told_apart() -> None:
    board, mirror = CacheBoard(1, "e"), Mirror()
    board.update(0, CacheChange(blocks(1, 2), [], blocks(*range(CHUNK + 1))))
    messages = board.watch(0.0)
    await mirror.until(messages, {0: 1})
    mirror.take(await anext(messages))
    assert (mirror.blocks, mirror.host) == ({0: set(blocks(1, 2))}, {0: set(blocks(*range(CHUNK + 1)))})
    board.update(0, CacheChange([], blocks(2), blocks(CHUNK + 1), blocks(*range(CHUNK))))
    await mirror.until(messages, {0: 2})
    assert (mirror.blocks, mirror.host) == ({0: set(blocks(1))}, {0: set(blocks(CHUNK, CHUNK + 1))})
    await messages.aclose()


async def test_what_happens_while_the_snapshot_is_sent_follows_it() -> None:
    board, mirror = CacheBoard(2, "e"), Mirror()
    board.update(0, CacheChange(blocks(*range(2 * CHUNK + 1)), []))
    messages = board.watch(0.0)
    first = await anext(messages)
    assert [len(change.stored) for change in first.changes] == [CHUNK] and first.epoch == "e"
    mirror.take(first)
    board.update(1, CacheChange(blocks(5), []))
    board.update(0, CacheChange([], blocks(2 * CHUNK)))
    await mirror.until(messages, {0: 2, 1: 1})
    assert mirror.blocks == {0: set(blocks(*range(2 * CHUNK))), 1: set(blocks(5))}
    await messages.aclose()


async def test_engines_that_are_gone_have_cached_nothing() -> None:
    """Whatever they did not come to say: a flush is waited for only so long, and a wake may end half-way."""
    board, mirror = CacheBoard(2, "e"), Mirror()
    board.update(1, CacheChange(blocks(1, 2), [], blocks(2, 3), []))
    messages = board.watch(0.0)
    await mirror.until(messages, {0: 0, 1: 1})
    role = SimpleNamespace(disconnect=AsyncMock())
    frontend: Any = SimpleNamespace(
        profiling=AsyncMock(), role=role, ranks=AsyncMock(), board=Mock(), metrics=None, caches=board, _compiled={}
    )
    await Frontend.stop_ranks(frontend)
    await mirror.until(messages, {0: 0, 1: 2})
    assert mirror.blocks == mirror.host == {0: set(), 1: set()}
    board.update(1, CacheChange(blocks(1), []))  # as the first to say something after a wake
    await mirror.until(messages, {0: 0, 1: 3})
    await messages.aclose()


async def test_slow_watcher_gets_one_difference() -> None:
    board, mirror, rng = CacheBoard(1, "e"), Mirror(), random.Random(3)
    messages = board.watch(0.0)
    mirror.take(await anext(messages))
    held: set[bytes] = set()
    for _ in range(500):
        stored = set(blocks(*(rng.randrange(50) for _ in range(3)))) - held
        removed = {its for its in sorted(held) if rng.random() < 0.1}
        held = (held | stored) - removed
        board.update(0, CacheChange(sorted(stored), sorted(removed)))
    message = await anext(messages)
    assert len(message.changes) == 1 and len(message.changes[0].stored) <= 50
    mirror.take(message)
    assert mirror.blocks == {0: held} and mirror.sequences == {0: 500}
    await messages.aclose()
    assert not board._watchers


async def test_changes_that_cancel_out_still_advance_the_sequence() -> None:
    board, mirror = CacheBoard(1, "e"), Mirror()
    messages = board.watch(0.0)
    mirror.take(await anext(messages))
    board.update(0, CacheChange(blocks(1), []))
    board.update(0, CacheChange([], blocks(1)))
    board.update(0, CacheChange(blocks(2), []))
    await mirror.until(messages, {0: 3})
    assert mirror.blocks == {0: set(blocks(2))}
    await messages.aclose()


# ------------------------------------------------------------------------------------- a worker


async def until_holds(call: Messages, mirror: Mirror, wanted: set[bytes]) -> None:
    while not wanted <= mirror.blocks.get(0, set()):
        mirror.take(await call.read())


async def test_worker_tells_what_its_prefix_cache_holds() -> None:
    async with inside("unified") as [worker]:
        await check_what_is_told(worker)


async def check_what_is_told(worker: Inside) -> None:
    prompt = [random.randrange(1000, 9000) for _ in range(200)]
    pages = set(page_hashes(prompt[:192]))
    mirror, late = Mirror(), Mirror()
    call = worker.stub.WatchCache(worker_pb2.WatchCacheRequest(min_interval_ms=1))
    mirror.take(await call.read())
    async with FakeLink(worker) as link:
        wanted = request(prompt, max_tokens=4)
        link.submit(wanted)
        await link.finish(wanted)
        await until_holds(call, mirror, pages)
        second = worker.stub.WatchCache(worker_pb2.WatchCacheRequest())
        await until_holds(second, late, pages)
        assert late.blocks == mirror.blocks
        second.cancel()
    await worker.whole()
    await worker.stub.FlushCache(worker_pb2.FlushCacheRequest())
    while mirror.blocks[0]:
        mirror.take(await call.read())
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call.read()
