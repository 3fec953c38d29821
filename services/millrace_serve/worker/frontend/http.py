"""Plain HTTP for Prometheus and probes: GET /metrics, /health (the process lives) and /ready (the worker is READY)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from millrace_common import sockets

REQUEST_TIMEOUT_S = 5.0
Answer = tuple[int, str, bytes]  # status, content type, body
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 503: "Service Unavailable"}


class HttpServer:
    def __init__(self, routes: dict[str, Callable[[], Answer]]) -> None:
        self._routes = routes
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """The bound port."""
        listener = sockets.listen(f"{host}:{port}")
        self._server = await asyncio.start_server(self._serve, sock=listener, limit=16384)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                status, kind, body = self._answer(head)
                lines = (
                    f"HTTP/1.1 {status} {REASONS[status]}",
                    f"Content-Type: {kind}",
                    f"Content-Length: {len(body)}",
                    "Connection: close",
                )
                writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
                await writer.drain()
        writer.close()

    def _answer(self, head: bytes) -> Answer:
        words = head.split(b"\r\n", 1)[0].decode("latin-1").split(" ")
        if len(words) != 3:
            return 400, "text/plain", b"bad request\n"
        if words[0] != "GET":
            return 405, "text/plain", b"only GET\n"
        route = self._routes.get(words[1].partition("?")[0])
        return route() if route else (404, "text/plain", b"not found\n")
