"""A client that takes nothing of its stream for a minute loses it; one that takes a little keeps it. The test owns the
minute; the sockets are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import pytest
from millrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc, worker_pb2
from millrace_common.reasons import Reason
from millrace_router.apis import public_http
from millrace_router.apis.grpc import service as grpc_service
from millrace_router.http.guard import GrpcGuard, HttpGuard
from millrace_router.queue.tenant import DEFAULT
from millrace_rpc.errors import from_rpc_error
from millrace_rpc.http_connection import Connection, ConnectionLimits
from millrace_rpc.http_server import HttpServer
from millrace_rpc.server import Server
from router.fake_worker import UNIFIED, Behaviour, FakeWorker, expected, output
from router.harness import Cluster

PROMPT = [10, 20, 30]
LIMIT_S = 60.0


class Timer:
    def __init__(self, at: float, call: Callable[[], object]) -> None:
        self.at, self.call, self.cancelled = at, call, False

    def cancel(self) -> None:
        self.cancelled = True


class Clock:
    """An event loop's times and timers."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def time(self) -> float:
        return self.now

    def call_at(self, when: float, call: Callable[[], object]) -> Timer:
        self.timers.append(Timer(when, call))
        return self.timers[-1]

    def call_later(self, delay: float, call: Callable[[], object]) -> Timer:
        return self.call_at(self.now + delay, call)

    def run_to(self, when: float) -> None:
        while due := [timer for timer in self.timers if not timer.cancelled and timer.at <= when]:
            timer = min(due, key=lambda timer: timer.at)
            self.timers.remove(timer)
            self.now = timer.at
            timer.call()
        self.now = when


def produces(tokens: int) -> Behaviour:
    """So many tokens, 20 in a step, with room for others."""

    async def behave(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator[worker_pb2.SequenceOutput]:
        for first in range(0, tokens, 20):
            await asyncio.sleep(0.001)
            last = common_pb2.FINISH_REASON_LENGTH if first + 20 >= tokens else 0
            yield output(request, first, 20, last)

    return behave


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Connection]]:
    """Connections whose client does not take what waits for it."""
    found: list[Connection] = []
    for name, note in (("pause_writing", found.append), ("resume_writing", found.remove)):

        def noted(self: Connection, real: Callable = getattr(Connection, name), note: Callable = note) -> None:
            note(self)
            real(self)

        monkeypatch.setattr(Connection, name, noted)
    yield found


@pytest.fixture
async def made(cluster: Callable) -> Cluster:
    worker = FakeWorker(UNIFIED)
    worker.context = 1 << 21
    return await cluster(worker, limits={"unread": 1 << 20})


@contextlib.asynccontextmanager
async def over_http(made: Cluster, clock: Clock, tokens: int, stream: bool = True) -> AsyncIterator[socket.socket]:
    """A client that has sent a request, and has read nothing."""
    made.workers[0].script.append(produces(tokens))
    app = HttpGuard(public_http.build(made.router.inference, None), None)
    server = HttpServer(app, ConnectionLimits(stall_s=LIMIT_S), clock=clock)
    port = server.start("127.0.0.1:0")
    body = json.dumps({"prompt": PROMPT, "max_tokens": tokens, "stream": stream, "seed": 0, "logprobs": 5})
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        client.connect(("127.0.0.1", port))
        client.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        client.setblocking(False)
        yield client
    await server.stop()


def read_to_the_end(client: socket.socket) -> bytes:
    """Until the server has ended the connection."""
    text = b""
    client.settimeout(20)
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(1 << 16):
            text += piece
    return text


def outputs(made: Cluster) -> int:
    (stream,) = made.router.inference.active
    return len(stream.continuations[0].generation.flow.outputs)


async def produced(made: Cluster, more: int) -> None:
    goal = outputs(made) + more
    await made.until(lambda: outputs(made) >= goal, 20)


def lost(made: Cluster, api: str) -> float:
    return made.metric("millrace_requests_total", api=api, status="slow_client")


async def test_over_http(made: Cluster, paused: list[Connection]) -> None:
    clock = Clock()
    async with over_http(made, clock, 1 << 20) as client:
        await made.until(lambda: bool(paused), 20)
        (connection,) = paused
        held = connection.transport.get_write_buffer_size()
        clock.run_to(LIMIT_S - 0.1)
        await produced(made, 1000)
        assert connection.transport.get_write_buffer_size() == held < 1 << 20, "what comes meanwhile stays with us"
        assert not made.workers[0].aborted and DEFAULT.running.requests == 1 and not lost(made, "http")
        clock.run_to(LIMIT_S)
        assert (DEFAULT.running.requests, DEFAULT.running.tokens) == (0, 0) and lost(made, "http") == 1
        await made.until(lambda: bool(made.workers[0].aborted))
        text = await asyncio.to_thread(read_to_the_end, client)
        assert text.startswith(b"HTTP/1.1 200") and b"[DONE]" not in text
        await made.quiet()
    assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)


async def test_over_http_a_little_in_a_minute_is_enough(made: Cluster, paused: list[Connection]) -> None:
    """Then the whole minute begins again."""
    clock = Clock()
    async with over_http(made, clock, 1 << 20) as client:
        for minute in range(1, 4):
            await made.until(lambda: bool(paused), 20)
            left = paused[0].transport.get_write_buffer_size()

            def taken(left: int = left) -> bool:
                with contextlib.suppress(BlockingIOError):
                    client.recv(1 << 14)
                return not paused or paused[0].transport.get_write_buffer_size() < left

            await made.until(taken, 20)
            clock.run_to(minute * LIMIT_S)
            assert DEFAULT.running.requests == 1
        await made.until(lambda: bool(paused), 20)
        clock.run_to(5 * LIMIT_S)
        assert lost(made, "http") == 1
        await made.quiet()


@pytest.mark.parametrize("stream", [True, False])
async def test_over_http_the_end_of_an_answer_waits_no_longer(
    made: Cluster, paused: list[Connection], stream: bool
) -> None:
    clock, tokens = Clock(), 20_000
    async with over_http(made, clock, tokens, stream) as client:
        await made.until(lambda: bool(paused) and (not stream or outputs(made) == tokens), 20)
        await made.until(lambda: not made.workers[0].active)
        clock.run_to(LIMIT_S - 0.1)
        assert paused
        clock.run_to(LIMIT_S)
        await asyncio.to_thread(read_to_the_end, client)
        await made.quiet()
    assert lost(made, "http") == stream, "an answer that is not a stream is complete"


@contextlib.asynccontextmanager
async def over_grpc(made: Cluster, clock: Clock, tokens: int) -> AsyncIterator[Any]:
    """A call whose client reads only when it is told to."""
    made.workers[0].script.append(produces(tokens))
    server = Server([grpc_service.SERVICE], [GrpcGuard(None)])
    service = grpc_service.InferenceService(made.router.inference, clock)
    server.grpc.add_generic_rpc_handlers((service.handlers(),))
    port = await server.start("127.0.0.1:0")
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024), ("grpc.use_local_subchannel_pool", 1)]
    request = inference_pb2.GenerateRequest(
        prompt={"token_ids": {"ids": PROMPT}}, sampling={"max_tokens": tokens, "seed": 0, "logprobs": 20}
    )
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield inference_pb2_grpc.InferenceStub(channel).Generate(request)
    await server.stop(0)


async def stuck(made: Cluster) -> None:
    """Until the only stream's reader is away with a delta, and stays away."""

    def unread() -> bool:
        (stream,) = made.router.inference.active
        return stream._unread > 100

    await made.until(lambda: bool(made.router.inference.active), 20)
    await made.until(unread, 20)


async def test_over_grpc(made: Cluster) -> None:
    clock = Clock()
    async with over_grpc(made, clock, 1 << 20) as call:
        got = list((await call.read()).token_ids)
        await stuck(made)
        clock.run_to(LIMIT_S - 0.1)
        await produced(made, 1000)
        assert not made.workers[0].aborted and DEFAULT.running.requests == 1 and not lost(made, "grpc")
        clock.run_to(LIMIT_S)
        assert (DEFAULT.running.requests, DEFAULT.running.tokens) == (0, 0) and lost(made, "grpc") == 1
        await made.until(lambda: bool(made.workers[0].aborted))
        await made.quiet()
        with pytest.raises(grpc.aio.AioRpcError) as caught:  # a client that reads after all
            while (response := await asyncio.wait_for(call.read(), 120)) is not grpc.aio.EOF:
                got += response.token_ids
        error = from_rpc_error(caught.value)
        assert error.reason is Reason.SLOW_CLIENT and "60 s" in error.message
        assert got == expected(PROMPT, len(got)), "what it got has no hole"
    assert lost(made, "grpc") == 1 and made.metric("millrace_requests_total", api="grpc", status="cancelled") == 0


async def test_over_grpc_a_message_in_a_minute_is_enough(made: Cluster) -> None:
    clock = Clock()
    async with over_grpc(made, clock, 1 << 20) as call:
        for minute in range(1, 4):
            await stuck(made)
            (stream,) = made.router.inference.active
            clock.run_to(minute * (LIMIT_S - 1))
            while stream._unread > 100:
                assert (await asyncio.wait_for(call.read(), 120)).token_ids
        assert DEFAULT.running.requests == 1
        await stuck(made)
        clock.run_to(5 * LIMIT_S)
        assert lost(made, "grpc") == 1
        await made.quiet()


async def test_over_grpc_a_client_that_left_is_not_slow(made: Cluster) -> None:
    clock = Clock()
    async with over_grpc(made, clock, 1 << 20) as call:
        await call.read()
        await stuck(made)
        call.cancel()
        await made.quiet()
        clock.run_to(2 * LIMIT_S)
    assert not lost(made, "grpc") and made.metric("millrace_requests_total", api="grpc", status="cancelled") == 1
