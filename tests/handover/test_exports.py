"""Fan-out of chunks to Fetch streams, and the leases behind it, on a loop whose time is the next timer's."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from millrace_common import metrics as catalogue
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError
from millrace_serve.engine.core import (
    Failure,
    FinishReason,
    KvChunk,
    LeaseEnded,
    RequestId,
    SequenceOutput,
    ServePrefix,
    TokenOutput,
)
from millrace_serve.handover import exports as exports_module
from millrace_serve.handover.exports import Export, Exports
from millrace_serve.worker.config import WorkerTimeouts
from millrace_serve.worker.frontend.requests import ABORTED
from millrace_testing.blocks import block
from millrace_testing.jumping_loop import run
from prometheus_client import CollectorRegistry

ID, OTHER = RequestId(7, 0), RequestId(8, 0)
FIRST = SequenceOutput(ID, 0, [TokenOutput(1)])
FINAL = SequenceOutput(ID, 0, [TokenOutput(1)], FinishReason.STOP)


class Bench:
    def __init__(self, expects: int | None = None, **timeouts: float) -> None:
        self.sent: list[tuple[int, LeaseEnded | ServePrefix]] = []
        self.metrics = catalogue.Metrics(catalogue.WORKER, CollectorRegistry())
        send = lambda replica, message: self.sent.append((replica, message))  # noqa: E731
        self.exports = Exports(WorkerTimeouts(**{"stall": 10.0, "lease": 500.0, **timeouts}), self.metrics, send)
        if expects is not None:
            self.exports.expect(ID, expects)

    @property
    def ended(self) -> list[tuple[int, RequestId]]:
        return [(replica, message.id) for replica, message in self.sent if isinstance(message, LeaseEnded)]

    def publish(self, first_page: int, last: bool, first: SequenceOutput | None = FIRST, id: RequestId = ID) -> None:
        chunk = KvChunk(id, first_page, [first_page + 1], [block(0)], 64, last, first if last else None)
        self.exports.publish(2, chunk)

    def outcomes(self) -> dict[str, float]:
        """Counted ends, and the live leases."""
        rows = self.metrics.leases_ended.collect()[0].samples
        counts = {row.labels["outcome"]: row.value for row in rows if row.name.endswith("_total") and row.value}
        return {**counts, "live": self.metrics.leases._value.get()}

    async def fetch(self, id: RequestId = ID) -> list[int | str]:
        """Pages of the chunks, and "source"; without heartbeats."""
        items = [item async for item in self.exports.fetch(id) if item is not None]
        return ["source" if isinstance(item, Export) else item.first_page for item in items]

    async def refusal(self, fetch: Coroutine[Any, Any, Any] | asyncio.Task[Any] | None = None) -> Reason:
        with pytest.raises(MillraceError) as caught:
            await (fetch or self.fetch())
        return Reason(caught.value.reason)


@run
async def test_fetch_at_any_time_gets_all_parts_until_the_release() -> None:
    bench = Bench()
    early = asyncio.create_task(bench.fetch())  # before the prompt is known
    await asyncio.sleep(0)
    bench.exports.expect(ID, 2)
    bench.publish(0, last=False)
    late = asyncio.create_task(bench.fetch())
    await asyncio.sleep(30)
    bench.publish(1, last=True)
    await asyncio.sleep(30)
    assert bench.outcomes() == {"live": 1}
    assert bench.exports.leases.release(ID)
    assert await early == await late == ["source", 0, 1]
    assert bench.ended == [(2, ID)] and bench.outcomes() == {"released": 1, "live": 0}
    assert await bench.refusal() is Reason.KV_NOT_FOUND  # nothing is left to fetch


@run
async def test_fetch_of_an_unknown_attempt_ends_as_not_found() -> None:
    """Behind heartbeats."""
    bench, seen = Bench(), []

    async def fetch() -> None:
        async for item in bench.exports.fetch(ID):
            seen.append(item)

    assert await bench.refusal(fetch()) is Reason.KV_NOT_FOUND
    assert seen and set(seen) == {None}


@run
async def test_heartbeats_renew_a_lease_up_to_its_maximum() -> None:
    bench = Bench(expects=0, lease=6.0)
    bench.publish(0, last=True)
    fetch = asyncio.create_task(bench.fetch())
    await asyncio.sleep(15)
    assert bench.ended == []  # far past lease
    assert await bench.refusal(fetch) is Reason.KV_EXPIRED
    assert bench.ended == [(0, ID)] and not bench.exports.leases.release(ID)


@run
async def test_leases_that_nobody_fetches_expire_one_by_one() -> None:
    """The timer of the first is not the last one."""
    bench = Bench(lease=20.0)
    for id in (ID, OTHER):
        bench.exports.expect(id, 0)
        bench.publish(0, last=True, id=id)
        await asyncio.sleep(10)
    await asyncio.sleep(5)
    assert bench.ended == [(0, ID)] and bench.outcomes() == {"expired": 1, "live": 1}
    await asyncio.sleep(10)
    assert bench.ended == [(0, ID), (0, OTHER)] and bench.outcomes() == {"expired": 2, "live": 0}
    assert await bench.refusal() is Reason.KV_EXPIRED


@run
async def test_prompt_that_fails_ends_every_fetch_with_its_reason() -> None:
    bench = Bench(expects=0)
    bench.publish(0, last=False)
    fetch = asyncio.create_task(bench.fetch())
    await asyncio.sleep(0)
    assert bench.exports.fail(ID, Failure(Reason.DEADLINE_EXCEEDED, "too late"))
    assert await bench.refusal(fetch) is await bench.refusal() is Reason.DEADLINE_EXCEEDED
    assert bench.ended == [(0, ID)] and bench.outcomes() == {"aborted": 1, "live": 0}


@run
async def test_part_behind_the_abort_gives_its_pages_back() -> None:
    bench = Bench(expects=1)
    assert bench.exports.fail(ID, ABORTED) and not bench.exports.fail(ID, ABORTED)
    bench.publish(0, last=True)
    assert bench.ended[0] == (1, ID) and len(bench.ended) == 2  # the engine holds the pages only with the last chunk
    assert not bench.exports.leases.release(ID)


@run
async def test_final_first_token_gives_pages_back_and_reaches_fetches() -> None:
    bench = Bench(expects=2)
    bench.publish(0, last=False)
    early = asyncio.create_task(bench.fetch())
    await asyncio.sleep(1)
    bench.publish(1, last=True, first=FINAL)
    assert bench.ended == [(2, ID)] and bench.outcomes() == {"aborted": 1, "live": 0}
    assert await early == await bench.fetch() == ["source", 0, 1]
    assert not bench.exports.leases.release(ID)  # nothing that was read may be used


@run
async def test_ended_attempts_are_remembered_up_to_a_limit() -> None:
    """Of few also the chunks: nobody fetches those of a request of one token."""
    bench = Bench()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exports_module, "MAX_ENDED", 3)
        patch.setattr(exports_module, "MAX_FINISHED", 2)
        ids = [RequestId(room, 0) for room in range(1, 5)]
        for id in ids:
            bench.exports.expect(id, 0)
            bench.publish(0, last=True, first=FINAL, id=id)
    assert [id in bench.exports for id in ids] == [False, True, True, True]
    assert await bench.refusal(bench.fetch(ids[1])) is Reason.KV_NOT_FOUND
    assert await bench.fetch(ids[2]) == await bench.fetch(ids[3]) == ["source", 0]


@run
async def test_prefix_fetch_counts_its_pages_and_is_never_renewed() -> None:
    bench = Bench(lease=20.0)
    id = bench.exports.serve_prefix(1, [block(1), block(2)])
    assert bench.sent == [(1, ServePrefix(id, [block(1), block(2)]))]
    bench.exports.publish(1, KvChunk(id, 0, [4, 5], [block(1), block(2)], 128, True))
    fetch = asyncio.create_task(bench.fetch(id))
    await asyncio.sleep(15)
    assert bench.metrics.prefix_fetch_pages.labels(direction="served")._value.get() == 2
    assert bench.outcomes() == {"live": 1}
    assert await bench.refusal(fetch) is Reason.KV_EXPIRED
    assert id not in bench.exports and bench.outcomes() == {"expired": 1, "live": 0}
