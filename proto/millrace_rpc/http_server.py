"""uvicorn inside our event loop: one listener, plain or TLS, with limits on its connections (http_connection.py)."""

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from millrace_rpc.http_connection import BODY, Connection, ConnectionLimits, Crowd
from millrace_rpc.tls import Identity

STOP_GRACE_S = 1  # for open connections when the server stops
MAX_UNSENT_BYTES = 128 << 10  # of a connection, in the kernel
DEFAULT = ConnectionLimits()


class HttpServer:
    def __init__(
        self,
        app: ASGIApp,
        limits: ConnectionLimits = DEFAULT,
        parting: asyncio.Event | None = None,
        clock: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        """While `parting` is set, every answer is the last one of its connection. `clock`: of clients that do not read;
        none: the event loop.
        """
        protocol = functools.partial(Connection, limits, Crowd(limits), parting or asyncio.Event(), clock)
        self._config = uvicorn.Config(
            _ForOldClients(app),
            http=protocol,  # type: ignore[arg-type]  # it is only called
            ws="none",
            log_config=None,
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=limits.idle_s,  # type: ignore[arg-type]  # it is only added to times
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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host.strip("[]"), int(port)), family=family, backlog=2048)
    # Its connections have both: the kernel takes few bytes ahead of a slow client, and holds back no small write.
    for option, value in ((socket.TCP_NOTSENT_LOWAT, MAX_UNSENT_BYTES), (socket.TCP_NODELAY, 1)):
        listener.setsockopt(socket.IPPROTO_TCP, option, value)
    return listener


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the process, not to its HTTP server."""
        yield


class _ForOldClients:
    """ASGI middleware: HTTP/1.0 knows no chunks, so the answer ends with its connection.

    uvicorn would send chunks. For the method HEAD it writes the headers as they are, and no body; so it is told that
    method, and the body is written here.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["http_version"] != "1.0" or scope["method"] == "HEAD":
            await self._app(scope, receive, send)
            return
        body = scope[BODY].plain()
        asked = {**scope, BODY: body}
        scope["method"] = "HEAD"

        async def send_plain(message: Message) -> None:
            body.write(message.get("body", b""))
            await send(message)

        await self._app(asked, receive, send_plain)
