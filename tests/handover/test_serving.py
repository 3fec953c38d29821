"""What a Fetch that asks for a prefix fetch gets, and what it leaves behind; the call and the engine are the test."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from millrace.v1 import kv_pb2
from millrace_common import metrics as catalogue
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError
from millrace_serve.engine.core import KvChunk, LeaseEnded, ServePrefix
from millrace_serve.handover.exports import Exports
from millrace_serve.handover.failed_reads import FailedReads
from millrace_serve.handover.serving import KvServicer
from millrace_serve.transfer.base import MemoryHandle
from millrace_serve.worker.config import WorkerTimeouts
from millrace_testing.blocks import block
from prometheus_client import CollectorRegistry

BLOCKS = [block(1), block(2)]


class Call:
    """One Fetch for a prefix fetch; it releases what it has got."""

    def __init__(self, admitted: bool = True) -> None:
        self.engine: list[ServePrefix | LeaseEnded] = []
        self.ends: list[Callable[[object], None]] = []  # what is to be done when the call is over
        self.add_done_callback = self.ends.append
        metrics = catalogue.Metrics(catalogue.WORKER, CollectorRegistry())
        self.exports = Exports(WorkerTimeouts(), metrics, lambda replica, message: self.engine.append(message))
        handle = MemoryHandle("nixl", "agent", b"", 0, 64, 10)
        ranks = SimpleNamespace(
            ready_info=SimpleNamespace(layout=SimpleNamespace(fingerprint="f")), memory_of=lambda replica: [handle]
        )
        refusal = None if admitted else MillraceError(Reason.DRAINING, "the worker drains")
        requests = SimpleNamespace(check_admission=Mock(side_effect=refusal))
        config = SimpleNamespace(dp=2, limits=SimpleNamespace(max_pages_per_seq=8))
        frontend: Any = SimpleNamespace(epoch="e", ranks=ranks, requests=requests, config=config)
        self._servicer = KvServicer(frontend, self.exports, FailedReads("reads", 4, lambda why: None))
        self._released = asyncio.Event()

    async def _requests(self) -> AsyncIterator[kv_pb2.FetchRequest]:
        prefix = kv_pb2.FetchPrefix(replica=1, blocks=BLOCKS)
        yield kv_pb2.FetchRequest(open=kv_pb2.FetchOpen(id={"room": 5}, epoch="e", fingerprint="f", prefix=prefix))
        await self._released.wait()
        yield kv_pb2.FetchRequest(release=kv_pb2.FetchRelease())

    async def run(self, num_pages: int) -> list[str]:
        """The answers, by kind; the engine serves so many pages."""
        answers = []
        fetch = self._servicer.Fetch(self._requests(), self)  # type: ignore[arg-type]
        asyncio.get_running_loop().call_soon(self._serve_prefix, num_pages)
        async for answer in fetch:
            answers.append(str(answer.WhichOneof("message")))
            if answers[-1] == "chunk":
                self._released.set()
        return answers

    def _serve_prefix(self, num_pages: int) -> None:
        [serve_prefix] = self.engine
        pages, fingerprints = [*range(3, 3 + num_pages)], BLOCKS[:num_pages]
        self.exports.publish(1, KvChunk(serve_prefix.id, 0, pages, fingerprints, 64 * num_pages, True))


@pytest.mark.parametrize(("num_pages", "answers"), [(2, ["source", "chunk", "release_confirmed"]), (0, ["chunk"])])
async def test_prefix_fetch_without_a_page_tells_no_memory(num_pages: int, answers: list[str]) -> None:
    call = Call()
    assert await call.run(num_pages) == answers
    assert [type(message) for message in call.engine] == [ServePrefix, LeaseEnded] and call.exports.leases.num_live == 0


async def test_prefix_fetch_while_the_worker_drains_is_refused() -> None:
    call = Call(admitted=False)
    with pytest.raises(MillraceError) as caught:
        await call.run(2)
    assert caught.value.reason is Reason.DRAINING and call.engine == []


async def test_prefix_fetch_ends_with_its_call() -> None:
    call = Call()
    fetch = call._servicer.Fetch(call._requests(), call)  # type: ignore[arg-type]
    asyncio.get_running_loop().call_soon(call._serve_prefix, 2)
    await anext(fetch)
    assert call.exports.leases.num_live == 1
    for end in call.ends:
        end(None)
    [serve_prefix, ended] = call.engine
    assert ended == LeaseEnded(serve_prefix.id) and call.exports.leases.num_live == 0
    await fetch.aclose()
