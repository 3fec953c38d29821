"""A worker's spans of attempts, by route and by how they end; and its connections after a new certificate."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from millrace.v1 import worker_pb2, worker_pb2_grpc
from millrace_common.spans import Tracing
from millrace_common.tls_config import Tls
from millrace_common.tracing_otel import OtelTracer, provider
from millrace_rpc.errors import MillraceError
from millrace_rpc.server import Server
from millrace_rpc.tls import Identity
from millrace_serve.engine.core import Failure, FinishReason, RequestId, Route, SequenceOutput, TokenOutput
from millrace_serve.handover.peers import Peers
from millrace_serve.worker.frontend.spans import WorkerSpans
from millrace_testing.certificates import Authority
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
ID = RequestId(7, 0)
FIRST = SequenceOutput(ID, 0, [TokenOutput(1)], queued_s=0.25)
LAST = SequenceOutput(ID, 1, [TokenOutput(2)], FinishReason.LENGTH)


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    async def GetInfo(
        self, request: worker_pb2.GetInfoRequest, context: grpc.aio.ServicerContext
    ) -> worker_pb2.WorkerInfo:
        return worker_pb2.WorkerInfo(epoch="e")

    async def WatchLoad(
        self, request: worker_pb2.WatchLoadRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[worker_pb2.LoadSnapshot]:
        yield worker_pb2.LoadSnapshot(epoch="e")
        await asyncio.Event().wait()


class Recorded:
    def __init__(self, route: Route, parent: str = PARENT) -> None:
        self._exporter, made = InMemorySpanExporter(), provider(Tracing(), "millrace-worker", "w")
        made.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.spans = WorkerSpans(OtelTracer(made))
        self.spans.begin(ID, route, parent, 10)

    def tree(self) -> dict[str, tuple[str, str]]:
        """Name to the parent's name ("" for the router's attempt) and the error."""
        finished = self._exporter.get_finished_spans()
        names = {span.context.span_id: span.name for span in finished}
        return {span.name: (names.get(span.parent.span_id, ""), span.status.description or "") for span in finished}

    def seconds(self, name: str) -> float:
        (span,) = [span for span in self._exporter.get_finished_spans() if span.name == name]
        return (span.end_time - span.start_time) / 1e9


async def test_prompt_for_another_worker() -> None:
    recorded = Recorded(Route.EXPORT)
    recorded.spans.on_outputs([FIRST])
    assert recorded.tree() == {"prefill": ("", ""), "queue": ("prefill", "")}
    assert recorded.seconds("queue") == pytest.approx(0.25, abs=1e-3)


async def test_both_phases_here() -> None:
    recorded = Recorded(Route.LOCAL)
    for output in (FIRST, LAST):
        recorded.spans.on_outputs([output])
    assert recorded.tree() == {"prefill": ("", ""), "queue": ("prefill", ""), "decode": ("", "")}


async def test_import() -> None:
    recorded = Recorded(Route.IMPORT)
    recorded.spans.waits_for_pages(ID)
    recorded.spans.has_pages(ID)
    recorded.spans.imported(ID, 3)
    recorded.spans.on_outputs([LAST])
    assert recorded.tree() == {"transfer": ("", ""), "queue": ("transfer", ""), "decode": ("", "")}


@pytest.mark.parametrize("route", Route)
async def test_failures_end_what_went_on(route: Route) -> None:
    recorded = Recorded(route)
    recorded.spans.waits_for_pages(ID)
    failure = Failure("STALLED", "no part")
    recorded.spans.on_outputs([SequenceOutput(ID, 0, [], FinishReason.ERROR, failure)])
    recorded.spans.end(ID, "once more")
    name = "transfer" if route is Route.IMPORT else "prefill"
    assert recorded.tree()[name] == ("", "STALLED: no part") and set(recorded.tree()) == {name, "queue"}


async def test_what_nobody_traces_leaves_nothing() -> None:
    recorded = Recorded(Route.LOCAL, "")
    recorded.spans.on_outputs([FIRST, LAST])
    recorded.spans.close()
    assert recorded.tree() == {}


async def test_end_does_not_wait_for_calls_with_an_old_certificate(tmp_path: Path) -> None:
    """The watch of a peer whose certificate is replaced at once is cancelled before it was sent."""
    now, authority = 0.0, Authority()
    mine = Identity(Tls.model_validate(authority.tls(tmp_path)), clock=lambda: now)
    peers = Peers(lambda rank, agent: None, mine)
    peer = peers.get("127.0.0.1:9", "e")
    await asyncio.sleep(0)
    authority.tls(tmp_path)
    now = 10.0
    assert peers.get("127.0.0.1:9", "e") is peer and peers._replaced, "the old channel waits for its last calls"
    await peers.close()
    await asyncio.sleep(0)
    assert not peers._closing and not peers._replaced


async def test_peer_is_called_with_the_new_certificate(tmp_path: Path) -> None:
    now = 0.0
    authority, successor = Authority(), Authority()
    mine = Identity(Tls.model_validate(authority.tls(tmp_path / "mine")), clock=lambda: now)
    server = Server([])
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(Worker(), server.grpc)
    theirs = Identity(Tls.model_validate(successor.tls(tmp_path / "theirs", require_client_cert=True)))
    address = f"127.0.0.1:{await server.start('127.0.0.1:0', theirs)}"
    peers = Peers(lambda rank, agent: None, mine)
    try:
        with pytest.raises(MillraceError, match="WORKER_LOST"):
            await peers.get(address, "e").info()  # another authority's certificate, so it may be dropped as well
        successor.tls(tmp_path / "mine")
        now = 10.0
        peer = peers.get(address, "e")
        assert (await peer.info()).epoch == "e"
        successor.tls(tmp_path / "mine")
        now = 20.0
        assert peers.get(address, "e") is peer, "what its ranks know of it is kept"
        assert (await peer.info()).epoch == "e"
    finally:
        await peers.close()
        await server.stop(0)
