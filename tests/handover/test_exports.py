"""Fan-out of parts to Fetch streams, and the leases behind it. Times are a few hundredths of a second."""

from __future__ import annotations

import asyncio

import pytest
from millrace_common import metrics as catalogue
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError
from millrace_serve.engine.core import Failure, FinishReason, KvPart, LeaseEnded, RequestId, SequenceOutput, TokenOutput
from millrace_serve.handover.exports import Export, Exports
from millrace_serve.worker.config import WorkerTimeouts
from millrace_serve.worker.frontend.requests import ABORTED
from millrace_testing.blocks import block
from prometheus_client import CollectorRegistry

ID = RequestId(7, 0)
FIRST = SequenceOutput(ID, 0, [TokenOutput(1)])
FINAL = SequenceOutput(ID, 0, [TokenOutput(1)], FinishReason.STOP)


class Bench:
    def __init__(self, **timeouts: float) -> None:
        self.ended: list[tuple[int, RequestId]] = []
        values = {"stall": 0.1, "lease": 5.0, **timeouts}
        metrics = catalogue.Metrics(catalogue.WORKER, CollectorRegistry())
        self.exports = Exports(WorkerTimeouts(**values), metrics, self._end)

    def _end(self, replica: int, message: LeaseEnded) -> None:
        self.ended.append((replica, message.id))

    def publish(self, first_page: int, last: bool, first: SequenceOutput = FIRST) -> None:
        part = KvPart(ID, first_page, [first_page + 1], [block(0)], 64, last, first if last else None)
        self.exports.publish(2, part)


async def collect(exports: Exports) -> list[int | str]:
    """Pages of the parts; "source" and "." for a heartbeat."""
    items: list[int | str] = []
    async for item in exports.fetch(ID):
        items.append("source" if isinstance(item, Export) else "." if item is None else item.first_page)
    return items


def without_heartbeats(items: list[int | str]) -> list[int | str]:
    return [item for item in items if item != "."]


async def test_every_fetch_gets_all_parts_whenever_it_came() -> None:
    bench = Bench()
    early = asyncio.create_task(collect(bench.exports))  # before the prompt is known
    await asyncio.sleep(0)
    bench.exports.expect(ID, 2)
    bench.publish(0, last=False)
    late = asyncio.create_task(collect(bench.exports))
    await asyncio.sleep(0.03)
    bench.publish(1, last=True)
    await asyncio.sleep(0.03)
    assert bench.exports.leases.release(ID)
    for fetch in (early, late):
        assert without_heartbeats(await fetch) == ["source", 0, 1]
    assert bench.ended == [(2, ID)]
    with pytest.raises(MillraceError) as caught:
        await collect(bench.exports)
    assert caught.value.reason is Reason.KV_NOT_FOUND  # nothing is left to fetch


async def test_an_unknown_attempt_is_waited_for_with_heartbeats_and_then_not_found() -> None:
    bench = Bench()
    seen = []
    with pytest.raises(MillraceError) as caught:
        async for item in bench.exports.fetch(ID):
            seen.append(item)
    assert caught.value.reason is Reason.KV_NOT_FOUND
    assert seen and set(seen) == {None}


async def test_heartbeats_keep_the_lease_up_to_its_maximum() -> None:
    bench = Bench(lease=0.06)
    bench.exports.expect(ID, 0)
    bench.publish(0, last=True)
    fetch = asyncio.create_task(collect(bench.exports))
    await asyncio.sleep(0.15)
    assert bench.ended == []  # far past lease
    with pytest.raises(MillraceError) as caught:
        await fetch
    assert caught.value.reason is Reason.KV_EXPIRED
    assert bench.ended == [(0, ID)] and not bench.exports.leases.release(ID)


async def test_nobody_fetches_and_the_lease_expires() -> None:
    bench = Bench(lease=0.02)
    bench.exports.expect(ID, 0)
    bench.publish(0, last=True)
    await asyncio.sleep(0.1)
    assert bench.ended == [(0, ID)]
    with pytest.raises(MillraceError) as caught:
        await collect(bench.exports)
    assert caught.value.reason is Reason.KV_EXPIRED


async def test_a_failed_prompt_ends_its_fetch_at_once_with_the_reason() -> None:
    bench = Bench()
    bench.exports.expect(ID, 0)
    bench.publish(0, last=False)
    fetch = asyncio.create_task(collect(bench.exports))
    await asyncio.sleep(0)
    assert bench.exports.fail(ID, Failure(Reason.DEADLINE_EXCEEDED, "too late"))
    for late in (fetch, asyncio.create_task(collect(bench.exports))):
        with pytest.raises(MillraceError) as caught:
            await late
        assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    assert bench.ended == [(0, ID)]


async def test_a_part_that_comes_after_the_abort_gives_its_pages_back() -> None:
    bench = Bench()
    bench.exports.expect(ID, 1)
    assert bench.exports.fail(ID, ABORTED)
    assert not bench.exports.fail(ID, ABORTED)
    bench.publish(0, last=True)
    assert bench.ended[0] == (1, ID) and len(bench.ended) == 2  # the engine parks the pages only with the last part
    assert not bench.exports.leases.release(ID)


async def test_a_first_token_that_ends_the_sequence_gives_its_pages_back_and_still_reaches_every_fetch() -> None:
    bench = Bench(lease=60.0)
    bench.exports.expect(ID, 2)
    bench.publish(0, last=False)
    early = asyncio.create_task(collect(bench.exports))
    await asyncio.sleep(0.01)
    bench.publish(1, last=True, first=FINAL)
    assert bench.ended == [(2, ID)]
    assert bench.exports.leases.num_live == 0
    assert without_heartbeats(await early) == ["source", 0, 1]
    assert without_heartbeats(await collect(bench.exports)) == ["source", 0, 1]
    assert not bench.exports.leases.release(ID)  # nothing that was read may be used
