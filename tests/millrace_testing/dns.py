"""A name server of the test's own: `dns://127.0.0.1:PORT/NAME:…` makes gRPC ask it."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

A, NO_SUCH_NAME = 1, 3
ANSWER, AUTHORITATIVE = 1 << 15, 1 << 10
TTL_S = 3600  # of nobody's concern: who asks again wants to know anew


class Dns(asyncio.DatagramProtocol):
    def __init__(self) -> None:
        self.addresses: dict[str, str] = {}  # IPv4, by name; others do not exist
        self.asked: list[str] = []
        self.port = 0

    def target(self, name: str, port: int) -> str:
        return f"dns://127.0.0.1:{self.port}/{name}:{port}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: Any = transport

    def datagram_received(self, data: bytes, sender: tuple[str, int]) -> None:
        name, end = _name(data)
        (kind,) = struct.unpack_from(">H", data, end)
        self.asked.append(name)
        address = self.addresses.get(name)
        answers = b""
        if address is not None and kind == A:
            answers = struct.pack(">HHHIH", 0xC00C, A, 1, TTL_S, 4) + socket.inet_aton(address)
        flags = ANSWER | AUTHORITATIVE | (NO_SUCH_NAME if address is None else 0)
        head = data[:2] + struct.pack(">HHHHH", flags, 1, bool(answers), 0, 0)
        self._transport.sendto(head + data[12 : end + 4] + answers, sender)


def _name(query: bytes) -> tuple[str, int]:
    """The name that is asked for, and the place behind it."""
    labels, place = [], 12
    while length := query[place]:
        labels.append(query[place + 1 : place + 1 + length].decode())
        place += 1 + length
    return ".".join(labels).lower(), place + 1


@contextlib.asynccontextmanager
async def name_server() -> AsyncIterator[Dns]:
    loop = asyncio.get_running_loop()
    transport, dns = await loop.create_datagram_endpoint(Dns, local_addr=("127.0.0.1", 0))
    dns.port = transport.get_extra_info("sockname")[1]
    try:
        yield dns
    finally:
        transport.close()
