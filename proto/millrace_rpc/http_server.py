"""uvicorn inside our event loop: one listener, plain or TLS, with limits on a request's headers."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from millrace_common.reasons import Reason
from starlette.types import ASGIApp, Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millrace_rpc.errors import MillraceError
from millrace_rpc.tls import Identity

STOP_GRACE_S = 1  # for open connections when the server stops
MAX_HEAD_BYTES = 64 << 10  # of what was received before a request's headers were complete
MAX_HEAD_S = 30.0  # from the connection, or a later request's first byte, to the end of its headers
MAX_REQUESTS = 10_000  # on one connection of `Ageing`
BODY = "millrace.body"  # a scope's `Body`


class HttpServer:
    def __init__(self, app: ASGIApp, protocol: Callable[..., BoundedHead] | None = None) -> None:
        """`protocol` makes one connection's protocol; none: `BoundedHead`."""
        self._config = uvicorn.Config(
            app,
            http=protocol or BoundedHead,  # type: ignore[arg-type]  # it is only called
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_graceful_shutdown=STOP_GRACE_S,
        )
        self._server = _Server(self._config)
        self._task: asyncio.Task[None] | None = None

    def start(self, address: str, identity: Identity | None = None) -> int:
        """Bind `host:port` (port 0: any free one) and serve; the bound port. OSError when the address is taken."""
        self._config.load()
        self._config.ssl = None if identity is None else identity.server_context()
        listener = listen(address)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        return int(listener.getsockname()[1])

    async def stop(self) -> None:
        """Returns when no connection and no task of the server is left. Idempotent."""
        self._server.should_exit = True
        if self._task is not None:
            await self._task


def listen(address: str) -> socket.socket:
    """Listen on `host:port`, IPv6 as `[host]:port`; port 0: any free one. Raises OSError when the address is taken."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, int(port)), family=family, backlog=2048)


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process, not to its HTTP server."""
        yield


class Body:
    """The way around ASGI for an answer that streams: `send` is a coroutine in every middleware, a write is a call.
    Only between two `send`s of an answer without content-length.
    """

    def __init__(self, transport: asyncio.Transport, flow: FlowControl) -> None:
        self._transport = transport
        self._flow = flow

    @property
    def ready(self) -> bool:
        """Nothing is wrong with the connection, and its client reads: else use `send`."""
        return not (self._flow.write_paused or self._transport.is_closing())

    def write(self, data: bytes) -> None:
        if data:  # an empty chunk would be the end
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def body_of(scope: Scope) -> Body | None:
    """None: another server serves the app."""
    return scope.get(BODY)


class BoundedHead(HttpToolsProtocol):
    """Ends a connection whose headers are too long or too slow; the parser alone has no limit."""

    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _in_head = True
    _completed = False  # the data at hand completed the headers of a request, or a request: most of it is no head

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._body = Body(transport, self.flow)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._in_head = True
        self._expect_head()
        super().on_message_begin()
        self.scope[BODY] = self._body  # type: ignore[literal-required]

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes, self._completed = False, 0, True
        self._cancel_timer()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._completed = False
        super().data_received(data)
        if self._in_head and not self._completed and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                error = MillraceError(Reason.MESSAGE_TOO_LARGE, f"the headers have more than {MAX_HEAD_BYTES} bytes")
                self.transport.write(_last_answer(error))
                self.transport.close()

    def on_message_complete(self) -> None:
        self._in_head = self._completed = True  # the head of the next request
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._cancel_timer()
        self._head_timer = self.loop.call_later(MAX_HEAD_S, self._too_slow)

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_head()  # an earlier request of the connection is still being answered
        else:
            self.transport.close()


class Ageing(BoundedHead):
    """Connections end now and then, so that a new router replica gets its share of the load: the answer to a request on
    an old one says `connection: close`, which clients expect at any time. uvicorn has no option for it:
    `cycle.keep_alive` is its own, so a new version of uvicorn needs test_connections.py.
    """

    def __init__(self, max_age_s: float | None, parting: asyncio.Event, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parting = parting
        self._left = MAX_REQUESTS
        self._old_at = None if max_age_s is None else self.loop.time() + max_age_s * random.uniform(0.9, 1.1)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._left -= 1
        old = self._old_at is not None and self.loop.time() >= self._old_at
        if old or self._left <= 0 or self._parting.is_set():
            self.cycle.keep_alive = False


def _last_answer(error: MillraceError) -> bytes:
    """A whole HTTP/1.1 answer that ends its connection, for errors before a request is complete."""
    body = json.dumps(error.http_body(), separators=(",", ":")).encode()
    head = f"HTTP/1.1 {error.row.http} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body
