"""The HTTP server of every process: limits on headers, and an end that leaves nothing behind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from millrace_rpc import http_server
from millrace_rpc.http_server import MAX_HEAD_BYTES, HttpServer, body_of
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, StreamingResponse
from starlette.routing import Route


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse("hello")


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


@pytest.fixture
async def port() -> AsyncIterator[int]:
    """Of a server; afterwards nothing of it is left."""
    before = asyncio.all_tasks()
    server = HttpServer(Starlette(routes=[Route("/", hello), Route("/slow", slow), Route("/streamed", streamed)]))
    port = server.start("127.0.0.1:0")
    yield port
    await server.stop()
    await server.stop()
    assert asyncio.all_tasks() - before == {asyncio.current_task()}
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


async def said(port: int, text: bytes) -> bytes:
    """Everything that the server says until it closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(text)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


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
    assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 413")
    writer.close()
    monkeypatch.setattr(http_server, "MAX_HEAD_S", 0.1)
    assert await said(port, b"GET / HTTP/1.1\r\n") == b""


async def test_the_end_of_a_body_does_not_count_as_the_next_head(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_HEAD_BYTES", 1000)
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 2000\r\n\r\n"
    for part in (head, b"a" * 2000, b"GET / HTTP/1.1\r\nhost: x\r\n", b"connection: close\r\n\r\n"):
        writer.write(part)
        await asyncio.sleep(0.05)  # the server reads each by itself
    answers = await asyncio.wait_for(reader.read(), 10)
    writer.close()
    assert answers.startswith(b"HTTP/1.1 405") and answers.endswith(b"hello"), answers


async def test_a_stop_ends_requests_and_idle_connections(port: int) -> None:
    """The fixture looks for what is left of them."""
    for text in (b"", b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n"):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(text)
        await writer.drain()
    await asyncio.sleep(0.05)
