"""uvicorn inside our event loop: one listener, plain or TLS."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Iterator
from typing import Any

import uvicorn
from millrace_common import sockets
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError
from millrace_rpc.tls import Identity
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millrace_router.config import Connections
from millrace_router.edge.http_answers import encode_error

STOP_GRACE_S = 1  # for connections, once every stream has ended
MAX_REQUESTS = 10_000  # on one connection: then the client connects anew, perhaps to another router
MAX_HEAD_BYTES = 64 << 10  # of what was received before a request's headers were complete
MAX_HEAD_S = 30.0  # from the connection, or a later request's first byte, to the end of its headers


class HttpServer:
    def __init__(self, app: ASGIApp, connections: Connections | None = None) -> None:
        """`connections`: how they age; none: not at all."""
        self._parting = asyncio.Event()
        http = _BoundedHead if connections is None else functools.partial(_Ageing, connections, self._parting)
        self._config = uvicorn.Config(
            app,
            http=http,  # type: ignore[arg-type]  # it is only called
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
        """Bind `host:port` (port 0: any free one) and serve; the bound port."""
        self._config.load()
        self._config.ssl = None if identity is None else identity.server_context()
        listener = sockets.listen(address, backlog=2048)
        self._task = asyncio.create_task(self._server.serve(sockets=[listener]))
        return listener.getsockname()[1]

    def part(self) -> None:
        """From now on every answer is its connection's last, so that the client's next connection reaches another
        router.
        """
        self._parting.set()

    async def stop(self) -> None:
        self._server.should_exit = True
        if self._task is not None:
            await self._task


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the process."""
        yield


class _BoundedHead(HttpToolsProtocol):
    """Limits of size and time for headers, which the parser alone keeps until they are complete."""

    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _in_head = True
    _got_through = False  # the data at hand completed a request's headers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_is_there()
        super().connection_lost(exc)

    def on_message_begin(self) -> None:
        self._in_head = True
        self._expect_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes, self._got_through = False, 0, True
        self._head_is_there()
        super().on_headers_complete()

    def data_received(self, data: bytes) -> None:
        self._got_through = False
        super().data_received(data)
        if self._in_head and not self._got_through and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                error = MillraceError(Reason.MESSAGE_TOO_LARGE, f"the headers have more than {MAX_HEAD_BYTES} bytes")
                self.transport.write(encode_error(error))
                self.transport.close()

    def on_message_complete(self) -> None:
        self._in_head = True  # of the next request
        super().on_message_complete()

    def _expect_head(self) -> None:
        self._head_is_there()
        self._head_timer = self.loop.call_later(MAX_HEAD_S, self._too_slow)

    def _head_is_there(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self._expect_head()  # an earlier request of the connection is still being answered
        else:
            self.transport.close()


class _Ageing(_BoundedHead):
    """The answer to a request on an old connection says `connection: close`, which clients expect at any time."""

    def __init__(self, connections: Connections, parting: asyncio.Event, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._parting = parting
        self._left = MAX_REQUESTS
        age = connections.max_age
        self._old_at = None if age is None else self.loop.time() + age * random.uniform(0.9, 1.1)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._left -= 1
        old = self._old_at is not None and self.loop.time() >= self._old_at
        if old or self._left <= 0 or self._parting.is_set():
            self.cycle.keep_alive = False
