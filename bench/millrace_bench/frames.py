"""A gRPC client for load: server streams of one method, read from HTTP/2 frames without a gRPC library, because that
would cost more per message than the router that it measures.

1. The connection opens the largest windows, so that the server never waits for us, and answers settings and pings.
2. `call` sends one request. 3. Of the messages it only counts the boundaries; the last one is kept. 4. Trailers end the
   call. They are not decoded: whether all is well, the caller sees by the last message.
"""

import asyncio
import ssl
import struct
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 3, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
INITIAL_WINDOW_SIZE = 4  # a setting
WINDOW, LARGEST_WINDOW = (1 << 16) - 1, (1 << 31) - 1
HEAD, PREFIX = 9, 5  # bytes before a frame, and before a message
LARGEST_REQUEST = (1 << 14) - PREFIX  # of one frame


@dataclass(slots=True)
class Call:
    """What came of one call. Times are of time.perf_counter(). `on_message` gets every message."""

    ended: asyncio.Future[None]
    first: float = 0.0
    messages: int = 0
    last: bytes = b""
    buffer: bytearray = field(default_factory=bytearray)  # a message's beginning
    on_message: Callable[[bytes], None] | None = None

    def feed(self, data: bytes) -> None:
        self.first = self.first or time.perf_counter()
        if self.buffer or len(data) != PREFIX + int.from_bytes(data[1:PREFIX], "big"):
            self.buffer += data
            while len(self.buffer) >= PREFIX:
                end = PREFIX + int.from_bytes(self.buffer[1:PREFIX], "big")
                if len(self.buffer) < end:
                    return
                self._note(bytes(self.buffer[PREFIX:end]))
                del self.buffer[:end]
        else:  # nearly always a frame is a message
            self._note(data[PREFIX:])

    def _note(self, message: bytes) -> None:
        self.messages, self.last = self.messages + 1, message
        if self.on_message is not None:
            self.on_message(message)


class Connection(asyncio.Protocol):
    """Use `connect`."""

    def __init__(self, path: str) -> None:
        fields = {":method": "POST", ":scheme": "http", ":path": path, ":authority": "bench"}
        fields |= {"content-type": "application/grpc", "te": "trailers"}
        self._headers = b"".join(_literal(name) for name in fields.items())
        self._calls: dict[int, Call] = {}
        self._next = 1  # a client's streams have odd numbers
        self._received = bytearray()
        self._window = WINDOW  # what the server takes from this connection
        self._wider = asyncio.Event()
        self._transport: asyncio.Transport | None = None

    async def call(self, message: bytes) -> Call:
        """The call when it has ended. Raises ConnectionError when the server breaks it off."""
        call = await self.begin(message)
        await call.ended
        return call

    async def begin(self, message: bytes) -> Call:
        if len(message) > LARGEST_REQUEST:
            raise ValueError(f"a request of {len(message)} bytes: at most {LARGEST_REQUEST}")
        size = PREFIX + len(message)
        while self._window < size:
            self._wider.clear()
            await self._wider.wait()
        self._window -= size
        stream, self._next = self._next, self._next + 2
        call = self._calls[stream] = Call(asyncio.get_running_loop().create_future())
        data = struct.pack(">BI", 0, len(message)) + message
        self._write(_frame(HEADERS, END_HEADERS, stream, self._headers) + _frame(DATA, END_STREAM, stream, data))
        return call

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is none by its class
        settings = struct.pack(">HI", INITIAL_WINDOW_SIZE, LARGEST_WINDOW)
        window = struct.pack(">I", LARGEST_WINDOW - WINDOW)
        self._write(PREFACE + _frame(SETTINGS, 0, 0, settings) + _frame(WINDOW_UPDATE, 0, 0, window))

    def connection_lost(self, error: Exception | None) -> None:
        for call in self._calls.values():
            call.ended.set_exception(ConnectionError(f"the server closed the connection: {error}"))
        self._calls.clear()

    def data_received(self, data: bytes) -> None:
        received = self._received
        received += data
        at, end = 0, len(received)
        while end - at >= HEAD:
            after = at + HEAD + int.from_bytes(received[at : at + 3], "big")
            if after > end:
                break
            stream = int.from_bytes(received[at + 5 : at + HEAD], "big")
            self._on_frame(received[at + 3], received[at + 4], stream, bytes(received[at + HEAD : after]))
            at = after
        del received[:at]

    def _on_frame(self, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if kind == DATA:
            self._calls[stream].feed(payload)
        elif kind == HEADERS and flags & END_STREAM:
            self._calls.pop(stream).ended.set_result(None)
        elif kind == RST_STREAM:
            error = ConnectionError(f"the server reset a stream with {int.from_bytes(payload, 'big')}")
            if call := self._calls.pop(stream, None):  # else it has ended
                call.ended.set_exception(error)
        elif kind in (SETTINGS, PING) and not flags & ACK:
            self._write(_frame(kind, ACK, 0, payload if kind == PING else b""))
        elif kind == WINDOW_UPDATE and stream == 0:
            self._window += int.from_bytes(payload, "big")
            self._wider.set()

    def _write(self, data: bytes) -> None:
        assert self._transport is not None
        self._transport.write(data)


async def connect(address: str, path: str, tls: ssl.SSLContext | None = None) -> Connection:
    """`path`: of the method, "/package.Service/Method"."""
    host, _, port = address.rpartition(":")
    if tls is not None:
        tls.set_alpn_protocols(["h2"])
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(path), host, int(port), ssl=tls)
    return connection


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(name_and_value: tuple[str, str]) -> bytes:
    """HPACK: a field that is not indexed, its name neither, without Huffman coding; both shorter than 127 bytes."""
    name, value = (text.encode() for text in name_and_value)
    return b"\0" + bytes([len(name)]) + name + bytes([len(value)]) + value
