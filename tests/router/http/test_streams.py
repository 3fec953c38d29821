"""Streams that their clients do not take, and streams in which nothing is said. The test owns the minute."""

import asyncio
import contextlib
import functools
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import anthropic
import grpc
import httpx
import pytest
from millrace.v1 import common_pb2, inference_pb2_grpc, worker_pb2
from millrace_common.reasons import Reason
from millrace_router.apis import public_http
from millrace_router.apis.anthropic.answers import MessageForm
from millrace_router.apis.grpc import service as grpc_service
from millrace_router.apis.openai.answers import AnswerShape
from millrace_router.apis.openai.responses import ResponseForm
from millrace_router.flow.heartbeat import Heartbeat
from millrace_router.flow.stream import Delta, ReaderState
from millrace_router.http.guard import GrpcGuard, HttpGuard
from millrace_router.queue.tenant import DEFAULT
from millrace_rpc.errors import from_rpc_error
from millrace_rpc.http_connection import Connection, ConnectionLimits
from millrace_rpc.http_server import HttpServer
from millrace_rpc.server import Server
from router.fake_worker import UNIFIED, Behaviour, FakeWorker, Outputs, behaviour, expected, failure, hangs, output
from router.harness import Clock, Cluster, request_of

PROMPT = [10, 20, 30]
LIMIT_S = 60.0


@behaviour
async def produces(worker: FakeWorker, request: worker_pb2.EngineRequest, tokens: int) -> Outputs:
    """So many tokens with room for others, the more in a step the fewer: those of a long stream outlast their test."""
    step = 100 if tokens < 1 << 20 else 20
    for first in range(0, tokens, step):
        await asyncio.sleep(0.001)
        last = common_pb2.FINISH_REASON_LENGTH if first + step >= tokens else 0
        yield output(request, first, step, last)


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
    return await cluster(worker, limits={"unread": 1 << 20}, timeouts={"client": LIMIT_S})


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
        client.sendall(f"POST /v1/completions HTTP/1.1\r\nhost:x\r\ncontent-length:{len(body)}\r\n\r\n{body}".encode())
        client.setblocking(False)
        yield client
    await server.stop()


def read_to_the_end(client: socket.socket) -> bytes:
    """Until the server has ended the connection."""
    text = b""
    client.settimeout(None)
    with contextlib.suppress(ConnectionResetError):
        while piece := client.recv(1 << 16):
            text += piece
    return text


def outputs(made: Cluster) -> int:
    (stream,) = made.router.inference.active
    return len(stream.continuations[0].generation.flow.outputs)


async def produced(made: Cluster, more: int) -> None:
    goal = outputs(made) + more
    await made.until(lambda: outputs(made) >= goal)


def lost(made: Cluster, api: str) -> float:
    return made.metric("millrace_requests_total", api=api, status="slow_client")


async def test_an_http_client_that_takes_nothing_loses_its_stream(made: Cluster, paused: list[Connection]) -> None:
    clock = Clock()
    async with over_http(made, clock, 1 << 20) as client:
        await made.until(lambda: bool(paused))
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


async def test_an_http_client_that_takes_a_little_keeps_its_stream(made: Cluster, paused: list[Connection]) -> None:
    """Then the whole minute begins again. How much the kernel takes at once is its own affair: it is told here."""
    clock = Clock()
    async with over_http(made, clock, 1 << 20) as client:
        await made.until(lambda: bool(paused))
        transport, waits = paused[0].transport, paused[0].transport.get_write_buffer_size()
        for minute in range(1, 4):
            transport.get_write_buffer_size = lambda left=waits - minute: left
            clock.run_to(minute * LIMIT_S)
            assert DEFAULT.running.requests == 1
        while paused:
            await asyncio.get_running_loop().sock_recv(client, 1 << 20)
        clock.run_to(4 * LIMIT_S)
        assert DEFAULT.running.requests == 1, "nothing waits for it"
        await made.until(lambda: bool(paused))
        clock.run_to(5 * LIMIT_S)
        assert lost(made, "http") == 1
        await made.quiet()


@pytest.mark.parametrize("stream", [True, False])
async def test_the_end_of_an_http_answer_waits_no_longer(made: Cluster, paused: list[Connection], stream: bool) -> None:
    clock, tokens = Clock(), 20_000
    async with over_http(made, clock, tokens, stream) as client:
        await made.until(lambda: bool(paused) and (not stream or outputs(made) == tokens))
        await made.until(lambda: not made.workers[0].active)
        clock.run_to(LIMIT_S - 0.1)
        assert paused
        clock.run_to(LIMIT_S)
        await asyncio.to_thread(read_to_the_end, client)
        await made.quiet()
    assert lost(made, "http") == stream, "an answer that is not a stream is complete"


@contextlib.asynccontextmanager
async def over_grpc(made: Cluster, clock: Clock, tokens: int, does: Behaviour | None = None) -> AsyncIterator[Any]:
    """A call whose client reads only when it is told to."""
    made.workers[0].script.append(does or produces(tokens))
    server = Server([grpc_service.SERVICE], [GrpcGuard(None)])
    service = grpc_service.InferenceService(made.router.inference, clock)
    server.grpc.add_generic_rpc_handlers((service.handlers(),))
    port = await server.start("127.0.0.1:0")
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024), ("grpc.use_local_subchannel_pool", 1)]
    request = request_of(PROMPT, tokens, logprobs=20)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield inference_pb2_grpc.InferenceStub(channel).Generate(request)
    await server.stop(0)


async def stuck(made: Cluster) -> None:
    """Until the only stream's reader is away with a delta, and stays away."""

    def unread() -> bool:
        (stream,) = made.router.inference.active
        return stream._unread > 100

    await made.until(lambda: bool(made.router.inference.active))
    await made.until(unread)


async def test_a_grpc_client_that_takes_nothing_loses_its_stream(made: Cluster) -> None:
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
            while (response := await call.read()) is not grpc.aio.EOF:
                got += response.token_ids
        error = from_rpc_error(caught.value)
        assert error.reason is Reason.SLOW_CLIENT and "60 s" in error.message
        assert got == expected(PROMPT, len(got)), "what it got has no hole"
    assert lost(made, "grpc") == 1 and made.metric("millrace_requests_total", api="grpc", status="cancelled") == 0


async def test_a_grpc_client_that_takes_a_message_keeps_its_stream(made: Cluster) -> None:
    clock = Clock()
    async with over_grpc(made, clock, 1 << 20) as call:
        for minute in range(1, 4):
            await stuck(made)
            (stream,) = made.router.inference.active
            clock.run_to(minute * (LIMIT_S - 1))
            while stream._unread > 100:
                assert (await call.read()).token_ids
        assert DEFAULT.running.requests == 1
        await stuck(made)
        clock.run_to(5 * LIMIT_S)
        assert lost(made, "grpc") == 1
        await made.quiet()


async def test_a_grpc_client_that_left_is_not_slow(made: Cluster) -> None:
    clock = Clock()
    async with over_grpc(made, clock, 1 << 20) as call:
        await call.read()
        await stuck(made)
        call.cancel()
        await made.quiet()
        clock.run_to(2 * LIMIT_S)
    assert not lost(made, "grpc") and made.metric("millrace_requests_total", api="grpc", status="cancelled") == 1


async def test_a_grpc_client_of_a_silent_worker_is_not_slow(made: Cluster) -> None:
    """Who has taken everything may wait for longer than a minute."""
    clock = Clock()
    async with over_grpc(made, clock, 100, hangs(after=2)) as call:
        got: list[int] = []
        while len(got) < 2:
            got += (await call.read()).token_ids
        (stream,) = made.router.inference.active
        await made.until(lambda: stream._reader is ReaderState.WAITS)
        clock.run_to(3 * LIMIT_S)
        assert made.router.inference.active and not made.workers[0].aborted
    await made.quiet()
    assert not lost(made, "grpc")


# ------------------------------------------------------------------------------------- streams in which nothing is said


QUESTION = {"model": "tiny", "max_tokens": 4, "stream": True}
ASKED = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/completions": QUESTION | {"prompt": "hello", "seed": 0},
    "/v1/chat/completions": QUESTION | {"messages": ASKED, "seed": 0},
    "/v1/responses": {"model": "tiny", "max_output_tokens": 4, "stream": True, "input": "hello", "seed": 0},
    "/v1/messages": QUESTION | {"messages": ASKED, "seed": 0},
}
COMMENT, PING = ": keep-alive", 'event: ping\ndata: {"type":"ping"}'


def test_a_beat_for_every_ten_seconds_of_silence() -> None:
    clock, beats = Clock(), []
    beat = Heartbeat(10.0, clock)
    beat.start(lambda: beats.append(clock.now))
    clock.run_to(35.0)
    assert beats == [10, 20, 30]
    beat.sent_at = 35.0  # a token
    clock.run_to(44.9)
    assert beats == [10, 20, 30]
    beat.sent_at = 44.9
    clock.run_to(70.0)
    assert beats == [10, 20, 30, 54.9, 64.9]


class Waiting:
    """A worker that says nothing until it may: before its first token, and after it."""

    def __init__(self, *, fails: bool = False) -> None:
        self.first, self.rest = asyncio.Event(), asyncio.Event()
        self._fails = fails

    async def __call__(self, worker: FakeWorker, request: worker_pb2.EngineRequest) -> Outputs:
        await self.first.wait()
        if self._fails:
            yield failure(request, "INTERNAL")
            return
        yield output(request, 0)
        await self.rest.wait()
        yield output(request, 1, 3, finish=common_pb2.FINISH_REASON_STOP)


@pytest.fixture
async def impatient(cluster: Callable) -> Cluster:
    return await cluster(FakeWorker(UNIFIED), connections={"keep_alive": 0.03})


async def events(answer: httpx.Response) -> AsyncIterator[str]:
    text = ""
    async for piece in answer.aiter_text():
        text += piece
        *whole, text = text.split("\n\n")
        for event in whole:
            yield event
    assert not text


@pytest.mark.parametrize("path", BODIES)
async def test_a_silent_stream_says_that_it_lives(impatient: Cluster, path: str) -> None:
    """Before the first token, and between two; what the client reads is otherwise that of a stream without silence."""
    plain = await impatient.http.post(path, json=BODIES[path])
    silence = PING if path == "/v1/messages" else COMMENT
    waiting = Waiting()
    impatient.workers[0].script.append(waiting)
    seen, quiet = [], 0
    async with impatient.http.stream("POST", path, json=BODIES[path]) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        async for event in events(answer):
            seen.append(event)
            quiet = quiet + 1 if event == silence else 0
            if quiet == 3:
                (waiting.rest if waiting.first.is_set() else waiting.first).set()
    assert waiting.rest.is_set() and seen[:3] == [silence] * 3
    told = "".join(text_in(event) for event in seen)
    assert told and told == "".join(text_in(event) for event in plain.text.split("\n\n"))
    await impatient.quiet()


def text_in(event: str) -> str:
    data = event.rpartition("data: ")[2]
    if not data.startswith("{"):
        return ""
    value = json.loads(data)
    choices = value.get("choices") or [{}]
    delta = choices[0].get("delta") or value.get("delta") or {}
    texts = choices[0].get("text"), delta if isinstance(delta, str) else delta.get("content") or delta.get("text")
    return "".join(text for text in texts if text)


ERRORS = {
    "/v1/completions": lambda value: value["error"]["code"] == "internal",
    "/v1/chat/completions": lambda value: value["error"]["code"] == "internal",
    "/v1/responses": lambda value: value["type"] == "response.failed" and value["sequence_number"] >= 2,
    "/v1/messages": lambda value: value["type"] == "error" and value["error"]["type"] == "api_error",
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_after_the_head_is_an_event_and_before_it_a_status(impatient: Cluster, path: str) -> None:
    waiting = Waiting(fails=True)
    impatient.workers[0].script.append(waiting)
    seen = []
    async with impatient.http.stream("POST", path, json=BODIES[path]) as answer:
        assert answer.status_code == 200
        async for event in events(answer):
            seen.append(event)
            waiting.first.set()
    assert ERRORS[path](json.loads(seen[-1].rpartition("data: ")[2])), seen
    impatient.router.inference.backend.config.connections.__dict__["keep_alive"] = 60.0
    at_once = Waiting(fails=True)
    at_once.first.set()
    impatient.workers[0].script.append(at_once)
    answer = await impatient.http.post(path, json=BODIES[path])
    assert answer.status_code == 500 and "scripted INTERNAL" in answer.text
    await impatient.quiet()


@pytest.mark.parametrize("fault", ["task", "sink", "end"])
@pytest.mark.parametrize("path", BODIES)
async def test_a_fault_of_ours_after_the_head_is_an_event(
    impatient: Cluster, monkeypatch: pytest.MonkeyPatch, path: str, fault: str
) -> None:
    """Wherever it is raised: where a task sends the deltas, where their round does, and in the last events."""

    def broken(form: object, delta: Delta | None = None, real: Callable = lambda *_: b"") -> bytes:
        if delta is None or not delta.first:
            raise RuntimeError("a fault of ours")
        return real(form, delta)

    for form in (AnswerShape, MessageForm, ResponseForm):
        push = functools.partialmethod(broken, real=form.push)
        monkeypatch.setattr(form, *(("end", broken) if fault == "end" else ("push", push)))
    waiting, client = Waiting(), impatient.http if fault == "sink" else impatient.direct
    impatient.workers[0].script.append(waiting)
    waiting.first.set()
    asked = asyncio.create_task(client.post(path, json=BODIES[path]))
    await impatient.until(lambda: any(stream._begun for stream in impatient.router.inference.active))
    waiting.rest.set()
    answer = await asked
    assert ERRORS[path](json.loads(answer.text.rpartition("data: ")[2])), answer.text
    await impatient.quiet()
    assert impatient.metric("millrace_requests_total", api="http", status="internal") == (fault != "end")


async def test_anthropics_client_skips_pings_and_raises_late_errors(impatient: Cluster) -> None:
    async with anthropic.AsyncAnthropic(base_url=impatient.url, api_key="none", max_retries=0) as client:
        waiting = await delayed(impatient)
        async with client.messages.stream(model="tiny", max_tokens=4, messages=ASKED) as stream:
            waiting.first.set()
            waiting.rest.set()
            message = await stream.get_final_message()
        assert len(message.content[0].text) == 4 and message.stop_reason == "end_turn"
        waiting = await delayed(impatient, fails=True)
        with pytest.raises(anthropic.APIStatusError, match="scripted INTERNAL"):
            async with client.messages.stream(model="tiny", max_tokens=4, messages=ASKED) as stream:
                waiting.first.set()
                await stream.get_final_message()


async def delayed(made: Cluster, *, fails: bool = False) -> Waiting:
    """The next request's head comes before its first token: the clients return from their call with the head."""
    waiting = Waiting(fails=fails)
    made.workers[0].script.append(waiting)
    return waiting


async def test_a_client_that_leaves_in_silence_is_noticed(impatient: Cluster) -> None:
    waiting = await delayed(impatient)
    async with impatient.http.stream("POST", "/v1/completions", json=BODIES["/v1/completions"]):
        pass
    await impatient.quiet()
    assert impatient.workers[0].aborted and not waiting.first.is_set()
