"""One HTTP connection of `HttpServer`: uvicorn's protocol with limits, and an end that loses no answer."""

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import httptools
from millrace_common.reasons import Reason
from starlette.types import Scope
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millrace_rpc.errors import MillraceError

MAX_HEAD_BYTES = 64 << 10  # of what was received before a request's headers were complete
MAX_HEAD_S = 30.0  # from a request's first byte to the end of its headers
MAX_REQUESTS = 10_000  # on one connection
MAX_DROPPED = 16 << 20  # bytes of a request that is refused: clients read no answer before they have sent it
LINGER_S = 5.0  # for a client to send them
RESET_S = 0.5  # for a client that sends more to read its answer
UNREAD_S = 30.0  # after the end, for a client to take the rest of an answer
BODY = "millrace.body"  # a scope's `Body`
NAMES = "millrace.names"  # a scope's names in the client's certificate


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Of the connections of one port. None: without the limit."""

    idle_s: float = 75.0  # between two requests, and before the first
    most: int | None = None
    per_address: int | None = None
    max_age_s: float | None = None  # give or take a tenth; then the next answer is the last one
    stall_s: float = 60.0  # in which a client takes nothing of what waits for it


class Crowd:
    """The connections of one port, as a whole and by the address of the client."""

    def __init__(self, limits: ConnectionLimits) -> None:
        self._limits = limits
        self._all = 0
        self._of: Counter[str] = Counter()

    def enter(self, address: str) -> MillraceError | None:
        """Count a connection, or return why it may not stay."""
        for count, most, whose in (
            (self._all, self._limits.most, "the server"),
            (self._of[address], self._limits.per_address, address),
        ):
            if most is not None and count >= most:
                return MillraceError(Reason.OVERLOADED, f"{whose} has {most} connections, the limit: close some")
        self._all += 1
        self._of[address] += 1
        return None

    def leave(self, address: str) -> None:
        self._all -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]


class Body:
    """The way around ASGI for an answer that streams: `send` is a coroutine in every middleware, a write is a call.
    Only between two `send`s of an answer without content-length.
    """

    on_stall: Callable[[], object] | None = None  # called before the connection ends, because its client reads nothing

    def __init__(self, transport: asyncio.Transport, flow: FlowControl, received: Callable[[], bool]) -> None:
        """`received`: the connection has no more to come of this request, nor of a later one."""
        self._transport = transport
        self._flow = flow
        self.received = received

    @property
    def ready(self) -> bool:
        """Nothing is wrong with the connection, and its client reads: else use `send`."""
        return not (self._flow.write_paused or self._transport.is_closing())

    def write(self, data: bytes) -> None:
        if data:  # an empty chunk would be the end
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data))

    def plain(self) -> "PlainBody":
        return PlainBody(self._transport, self._flow, self.received)


class PlainBody(Body):
    """Without chunks: the end of the connection is that of the body."""

    def write(self, data: bytes) -> None:
        self._transport.write(data)


def body_of(scope: Scope) -> Body | None:
    """None: another server serves the app."""
    return scope.get(BODY)


class Ending:
    """A transport whose `close` loses no answer, and ends although the client reads nothing.

    A socket that is closed with unread bytes resets the connection, and a client that still sends loses its answer. So
    the server's side is closed first, and the rest of the request is read and dropped, unless that is too much.
    """

    def __init__(self, transport: asyncio.Transport, rest: Callable[[], int]) -> None:
        """`rest`: bytes that the client may still send of a request that it has begun."""
        self.write = transport.write
        self.is_closing = transport.is_closing
        self._transport = transport
        self._rest = rest
        self._ending = False

    def __getattr__(self, name: str) -> Any:  # of the transport
        return getattr(self._transport, name)

    def close(self) -> None:
        if self._ending:
            return
        self._ending = True
        self.write, self.is_closing = lambda data: None, lambda: True
        rest = self._rest()
        if not rest or self._transport.is_closing():
            self.end()
            return
        wanted = rest <= MAX_DROPPED
        if wanted is not self._transport.is_reading():
            (self._transport.resume_reading if wanted else self._transport.pause_reading)()
        if self._transport.can_write_eof():
            self._transport.write_eof()
        asyncio.get_running_loop().call_later(LINGER_S if wanted else RESET_S, self.end)

    def end(self) -> None:
        """Close it now, but for an answer that is on its way."""
        self._transport.close()
        if self._transport.get_write_buffer_size():
            asyncio.get_running_loop().call_later(UNREAD_S, self._transport.abort)


class Connection(HttpToolsProtocol):
    """Ends when its headers are too long or too slow (the parser alone has no limit), when its client takes nothing of
    an answer, after an answer to a request whose body has not come, and now and then, so that a new replica gets its
    share of the load: the answer to a request on an old connection says `connection: close`, which clients expect at
    any time. uvicorn has no option for these. What is used of its protocol is private, so its release is pinned, and
    tests/rpc/test_http_server.py names it.
    """

    _address: str | None = None  # None: not counted
    _head_bytes = 0
    _head_timer: asyncio.TimerHandle | None = None
    _in_head = True
    _completed = False  # the data at hand completed the headers of a request, or a request: most of it is no head
    _offered = False  # another protocol, by the request whose headers are complete
    _to_come = 0  # bytes of a request that has begun; without a content-length as many as would be dropped
    _stays = True  # after the request whose body is being received
    _stall_timer: asyncio.TimerHandle | None = None
    _untaken = 0  # bytes that waited for the client when the timer was set

    def __init__(
        self,
        limits: ConnectionLimits,
        crowd: Crowd,
        parting: asyncio.Event,
        clock: asyncio.AbstractEventLoop | None,
        *args: Any,  # of uvicorn's protocol
        **kwargs: Any,  # the same
    ) -> None:
        super().__init__(*args, **kwargs)
        self._stall_s = limits.stall_s
        self._clock = clock or self.loop
        self._crowd = crowd
        self._parting = parting
        self._left = MAX_REQUESTS
        age = limits.max_age_s
        self._old_at = None if age is None else self.loop.time() + age * random.uniform(0.9, 1.1)

    def connection_made(  # type: ignore[override]  # servers of streams give no other transport
        self, transport: asyncio.Transport
    ) -> None:
        self._ending = Ending(transport, lambda: self._to_come)
        super().connection_made(self._ending)  # type: ignore[arg-type]  # it stands for the transport
        self._body = Body(self.transport, self.flow, lambda: not self._to_come)
        certificate = self.transport.get_extra_info("peercert") or {}
        self._names = [name for _, name in certificate.get("subjectAltName", ())]
        address = self.client[0] if self.client else ""
        if error := self._crowd.enter(address):
            self._refuse(error, to_come=0)
        else:
            self._address = address
            handler = self.timeout_keep_alive_handler
            self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, handler)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._address is not None:
            self._crowd.leave(self._address)
        self._cancel_timer()
        self._cancel_stall()
        self._unset_keepalive_if_required()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        self._cancel_stall()
        super().resume_writing()

    def on_message_begin(self) -> None:
        self._in_head = True
        self._expect_head()
        super().on_message_begin()
        scope: Scope = self.scope  # type: ignore[assignment]  # ASGI allows further keys
        scope[BODY] = self._body
        scope[NAMES] = self._names

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._offered = True  # another protocol: `_feed` asks again
            return
        self._in_head, self._head_bytes, self._completed = False, 0, True
        self._cancel_timer()
        if self.parser.get_http_version() == "1.0":
            self.expect_100_continue = False  # which that version does not know
        super().on_headers_complete()
        length = next((value for name, value in self.headers if name == b"content-length"), None)
        self._to_come = MAX_DROPPED if length is None else int(length)
        self._left -= 1
        old = self._old_at is not None and self.loop.time() >= self._old_at
        self._stays = self.cycle.keep_alive and not (old or self._left <= 0 or self._parting.is_set())
        self.cycle.keep_alive = False  # an answer that does not wait for the body is the last

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            self._to_come -= len(data)
            if self._to_come <= 0:
                self._ending.end()
            return
        self._completed = False
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        try:
            self._feed(data)
        except httptools.HttpParserError:
            self._refuse(MillraceError(Reason.INVALID_ARGUMENT, "the request is not HTTP/1.1"))
        if not self._in_head or self._completed or self.transport.is_closing():
            return
        if self._head_timer is None:  # an empty line before a request
            self._expect_head()
        self._head_bytes += len(data)
        if self._head_bytes > MAX_HEAD_BYTES:
            text = f"the headers have more than {MAX_HEAD_BYTES} bytes"
            self._refuse(MillraceError(Reason.MESSAGE_TOO_LARGE, text))

    def on_body(self, body: bytes) -> None:
        self._to_come -= len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._offered:
            return
        self._in_head = self._completed = True  # the head of the next request
        self._to_come = 0
        super().on_message_complete()
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._stays

    def shutdown(self) -> None:
        self._stays = False
        super().shutdown()

    def _feed(self, data: bytes) -> None:
        """The parser takes no body from a request that offers another protocol, as Java's client does with each. So
        such a request is parsed once more, without the offer.
        """
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as end:
                if not self._offered:  # CONNECT: the rest is no HTTP
                    return
                self._offered = False
                headers = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
                asked = self.parser.get_method(), self.url, self.parser.get_http_version().encode(), headers
                self.parser.feed_data(b"%b %b HTTP/%b\r\n%b\r\n" % asked)
                rest = rest[end.args[0] :]

    def _refuse(self, error: MillraceError, to_come: int = MAX_HEAD_BYTES) -> None:
        """End the connection, with an answer unless an earlier request's is on its way."""
        self._to_come = to_come
        in_body = not (self._in_head or self.pipeline)
        if self._answered() or (in_body and not self.cycle.response_started):
            self.transport.write(_last_answer(error))
        self.transport.close()

    def _answered(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        self._cancel_timer()
        self._head_timer = self.loop.call_later(MAX_HEAD_S, self._too_slow)

    def _cancel_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _expect_reading(self) -> None:
        self._untaken = self.transport.get_write_buffer_size()
        self._stall_timer = self._clock.call_later(self._stall_s, self._look_at_reader)

    def _look_at_reader(self) -> None:
        if self.transport.get_write_buffer_size() < self._untaken:
            self._expect_reading()
            return
        if self._body.on_stall is not None:
            self._body.on_stall()
        self.transport.abort()

    def _cancel_stall(self) -> None:
        if self._stall_timer is not None:
            self._stall_timer.cancel()
            self._stall_timer = None

    def _too_slow(self) -> None:
        if self._answered():
            self.transport.close()
        else:
            self._expect_head()  # an earlier request of the connection is still being answered


def _last_answer(error: MillraceError) -> bytes:
    """A whole HTTP/1.1 answer that ends its connection, for errors before a request is complete."""
    body = json.dumps(error.http_body(), separators=(",", ":")).encode()
    head = f"HTTP/1.1 {error.row.http} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body
