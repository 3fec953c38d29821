"""The HTTP server of every process: limits on headers, and an end that leaves nothing behind."""

import asyncio
import contextlib
import inspect
import json
import re
import socket
from collections.abc import AsyncIterator

import pytest
import uvicorn
from millrace_rpc import http_connection
from millrace_rpc.http_connection import MAX_HEAD_BYTES, ConnectionLimits, Ending, body_of
from millrace_rpc.http_server import HttpServer, listen
from millrace_testing import HANG_S
from millrace_testing.hasty import hasty_servers
from millrace_testing.ipv6 import needs_ipv6
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

TESTED = "0.54."  # before a new release of uvicorn is named here, it passes this file and tests/router/http


def test_uvicorn_is_the_release_whose_protocol_is_extended() -> None:
    assert uvicorn.__version__.startswith(TESTED), "see TESTED, and the pin in pyproject.toml"
    extended, base = inspect.getsource(http_connection.Connection), inspect.getsource(HttpToolsProtocol)
    own = set(re.findall(r"(?:self\.|def |^    )(_\w+)", extended, re.M)) - {"_unset_keepalive_if_required"}
    fetched = set(re.findall(r"\bself\.(\w+)", extended)) - own
    assert "cycle" in fetched and "flow" in fetched
    assert {name for name in fetched if not re.search(rf"(self\.|def ){name}\b", base)} == set()


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


async def length(request: Request) -> PlainTextResponse:
    return PlainTextResponse(f"{len(await request.body())} bytes")


async def slow(request: Request) -> PlainTextResponse:
    await asyncio.sleep(60)
    return PlainTextResponse("late")


async def streamed(request: Request) -> StreamingResponse:
    """Some parts through ASGI, some around it."""
    body = body_of(request.scope)
    assert body is not None

    async def parts() -> AsyncIterator[bytes]:
        yield b"one "
        assert body.ready
        for part in (b"two ", b"", b"three "):
            body.write(part)
        yield b"four"

    return StreamingResponse(parts())


ROUTES = {"/": hello, "/slow": slow, "/streamed": streamed}
APP = Starlette(
    routes=[*(Route(path, endpoint) for path, endpoint in ROUTES.items()), Route("/length", length, methods=["POST"])]
)


@pytest.fixture(autouse=True)
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    hasty_servers(monkeypatch)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Of a server; afterwards nothing of it is left."""
    before = asyncio.all_tasks()
    server = HttpServer(APP)
    port = server.start("127.0.0.1:0")
    yield port
    await server.stop()
    await server.stop()
    assert asyncio.all_tasks() - before == {asyncio.current_task()}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))


async def said(port: int, text: bytes) -> bytes:
    """Everything that the server says until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    with contextlib.closing(writer):
        return await asyncio.wait_for(reader.read(), HANG_S)


@contextlib.asynccontextmanager
async def serving(**limits: float) -> AsyncIterator[int]:
    server = HttpServer(APP, ConnectionLimits(**limits))
    yield server.start("127.0.0.1:0")
    await server.stop()


async def test_get_and_what_is_not_there(port: int) -> None:
    end = b" HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
    assert (await said(port, b"GET /" + end)).endswith(b"hello")
    assert (await said(port, b"GET /nothing" + end)).startswith(b"HTTP/1.1 404")
    assert (await said(port, b"POST /" + end)).startswith(b"HTTP/1.1 405")


async def test_a_body_written_around_asgi_is_whole_and_in_order(port: int) -> None:
    once, end = b"GET /streamed HTTP/1.1\r\nhost: x\r\n", b"connection: close\r\n\r\n"
    answers = await said(port, once + b"\r\n" + once + end)  # the second on the connection of the first
    chunks = b"4\r\none \r\n4\r\ntwo \r\n6\r\nthree \r\n4\r\nfour\r\n0\r\n\r\n"
    assert answers.count(chunks) == 2 and answers.endswith(chunks)


async def test_headers_are_bounded_in_size_and_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET / HTTP/1.1\r\nx-endless: " + b"a" * MAX_HEAD_BYTES)
    assert (await asyncio.wait_for(reader.readline(), HANG_S)).startswith(b"HTTP/1.1 413")
    writer.close()
    monkeypatch.setattr(http_connection, "MAX_HEAD_BYTES", 1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for piece in (b"GET / HTTP/1.1\r\n", *[b"x: " + b"a" * 300 + b"\r\n"] * 4):
        writer.write(piece)
        for _ in range(10):  # the server, on the same event loop, reads each by itself
            await asyncio.sleep(0)
    assert (await asyncio.wait_for(reader.readline(), HANG_S)).startswith(b"HTTP/1.1 413"), "all pieces together count"
    writer.close()
    monkeypatch.setattr(http_connection, "MAX_HEAD_S", 0.1)
    assert await said(port, b"GET / HTTP/1.1\r\n") == b""


async def test_the_end_of_a_body_does_not_count_as_the_next_head(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_connection, "MAX_HEAD_BYTES", 1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST /length HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n"
    for part in (head, b"a" * 2000, b"GET / HTTP/1.1\r\nhost: x\r\n", b"connection: close\r\n\r\n"):
        writer.write(part)
        await asyncio.sleep(0.05)  # the server reads each by itself
    answers = await asyncio.wait_for(reader.read(), HANG_S)
    writer.close()
    assert b"\r\n\r\n2000 bytesHTTP/1.1 200" in answers and answers.endswith(b"hello"), answers


async def test_a_stop_ends_requests_and_idle_connections(port: int) -> None:
    """The fixture looks for what is left of them."""
    for text in (b"", b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(text)
        await writer.drain()
    await asyncio.sleep(0.05)


# ------------------------------------------------------------------------------------- HTTP/1.0


@pytest.mark.parametrize("keep_alive", [b"", b"connection: keep-alive\r\n"])
async def test_an_old_client_gets_no_chunks(port: int, keep_alive: bytes) -> None:
    """nginx speaks HTTP/1.0 to its upstreams unless it is told otherwise."""
    head, _, body = (await said(port, b"GET /streamed HTTP/1.0\r\n" + keep_alive + b"\r\n")).partition(b"\r\n\r\n")
    assert body == b"one two three four"
    assert b"transfer-encoding" not in head and b"content-length" not in head and b"connection: close" in head
    head, _, body = (await said(port, b"GET / HTTP/1.0\r\n" + keep_alive + b"\r\n")).partition(b"\r\n\r\n")
    assert body == b"hello" and b"content-length: 5" in head and b"connection: close" in head


async def test_an_old_client_asks_for_heads_and_sends_bodies(port: int) -> None:
    head = await said(port, b"HEAD / HTTP/1.0\r\n\r\n")
    assert b"content-length: 5" in head and head.endswith(b"\r\n\r\n")
    sent = b"POST /length HTTP/1.0\r\nexpect: 100-continue\r\ncontent-length: 3\r\n\r\nabc"
    answer = await said(port, sent)
    assert answer.startswith(b"HTTP/1.1 200") and answer.endswith(b"\r\n\r\n3 bytes"), "no 100 (Continue)"


# ------------------------------------------------------------------------------------- requests that are strange


@pytest.mark.parametrize(
    "text",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01",  # TLS to a plain port
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET / HTTP/1.1\r\nhost : x\r\n\r\n",
        b"POST / HTTP/1.1\r\ncontent-length: 3\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
        b"POST /length HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /length HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /length HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\naXX",
        b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n",
    ],
)
async def test_what_is_no_request_gets_an_error_in_json(port: int, text: bytes) -> None:
    head, _, body = (await said(port, text)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and json.loads(body)["error"]["code"] == "invalid_argument"


async def test_what_follows_a_request_that_is_answered_is_not_answered_into_it(port: int) -> None:
    for after in (b"\x00\x00", b"POST /length HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n"):
        assert await said(port, b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n" + after) == b""


async def test_an_offer_of_another_protocol_is_not_taken(port: int) -> None:
    """Java's client offers HTTP/2 with every request."""
    offer = b"connection: upgrade, http2-settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):
        writer.write(b"POST /length HTTP/1.1\r\nhost: x\r\ncontent-length: 3\r\n" + offer + b"\r\nabc")
        assert (await asyncio.wait_for(reader.readuntil(b"3 bytes"), HANG_S)).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_the_whole_address_may_be_asked_for(port: int) -> None:
    """As clients ask a proxy."""
    assert (await said(port, b"GET http://x/ HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")).endswith(b"hello")


# ------------------------------------------------------------------------------------- the end of a connection


async def test_an_answer_that_does_not_wait_for_the_body_is_the_last(port: int) -> None:
    """And the rest of the body is not read."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.transport.set_write_buffer_limits(0)
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
    reading = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
    sent, piece = 0, bytes(1 << 16)
    with contextlib.suppress(ConnectionError):
        while True:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
    answer = await asyncio.wait_for(reading, HANG_S)
    assert answer.startswith(b"HTTP/1.1 405") and b"connection: close" in answer
    assert sent < 32 << 20, "the sockets' buffers, and a little more"
    writer.close()


async def test_idle_connections_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first request, after one, and after an empty line that is no request."""
    assert ConnectionLimits().idle_s == 75.0
    monkeypatch.setattr(http_connection, "MAX_HEAD_S", 0.1)
    async with serving(idle_s=0.1) as port:
        assert await said(port, b"") == b""
        assert (await said(port, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")).endswith(b"hello")
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await asyncio.wait_for(reader.readuntil(b"hello"), HANG_S)
        writer.write(b"\r\n")
        assert await asyncio.wait_for(reader.read(), HANG_S) == b""
        writer.close()


async def test_connections_are_bounded_by_address_and_in_all() -> None:
    for limit, whose in (("most", b"the server"), ("per_address", b"127.0.0.1")):
        async with serving(**{limit: 2}) as port:
            held = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2)]
            for _, writer in held:
                writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            for reader, _ in held:
                await asyncio.wait_for(reader.readuntil(b"hello"), HANG_S)
            refused = await said(port, b"")
            assert refused.startswith(b"HTTP/1.1 429") and whose + b" has 2 connections" in refused
            held[0][1].close()
            await held[0][1].wait_closed()
            while not (await said(port, b"GET / HTTP/1.0\r\n\r\n")).endswith(b"hello"):
                pass
            held[1][1].close()


class Transport:
    """Of a client that takes nothing."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> object:
        yes = ("can_write_eof", "get_write_buffer_size", "is_reading")
        return lambda *arguments: self.calls.append(name) or name in yes


@pytest.mark.parametrize(("rest", "before"), [(0, []), (9, ["write_eof"]), (10**9, ["pause_reading", "write_eof"])])
async def test_a_client_that_takes_no_answer_is_cut_off(
    monkeypatch: pytest.MonkeyPatch, rest: int, before: list[str]
) -> None:
    for wait in ("LINGER_S", "RESET_S", "UNREAD_S"):
        monkeypatch.setattr(http_connection, wait, 0.0)
    transport = Transport()
    ending = Ending(transport, lambda: rest)
    ending.close()
    ending.close()
    ending.write(b"late")
    assert ending.is_closing()
    while "abort" not in transport.calls:
        await asyncio.sleep(0)
    done = [call for call in transport.calls if call in ("pause_reading", "resume_reading", "write_eof")]
    assert done == before and [call for call in transport.calls if call in ("close", "abort")] == ["close", "abort"]


# ------------------------------------------------------------------------------------- addresses of both families


@pytest.mark.parametrize(
    ("address", "connect"),
    [
        ("127.0.0.1:0", "127.0.0.1"),
        ("localhost:0", "127.0.0.1"),
        pytest.param("[::1]:0", "::1", marks=needs_ipv6),
    ],
)
def test_a_client_gets_through(address: str, connect: str) -> None:
    with listen(address) as server:
        with socket.create_connection((connect, server.getsockname()[1]), 5):
            connection, _ = server.accept()
        with connection:
            assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY), "no answer waits for 40 ms"


def test_a_taken_port_is_an_error() -> None:
    with listen("127.0.0.1:0") as first, pytest.raises(OSError):
        listen(f"127.0.0.1:{first.getsockname()[1]}")
