"""Connections between ranks: Unix sockets within a host, TCP between hosts.

Every rank listens while the ranks join; of two that need each other the higher one connects. Both know the token of
this start of the worker, and whoever does not say it first is refused. The kernel closes the connections of a process
that ends, however it ends, so the ranks at the other ends know at once.
"""

import hmac
import logging
import socket
import struct
import time
from collections.abc import Collection

from millrace_common.log import PER_REQUEST

log = logging.getLogger(__name__)

TOKEN_BYTES = 16
HELLO = struct.Struct(f"={TOKEN_BYTES}sI")  # token, rank
FRAME = struct.Struct("=Q")  # before a message: its size
HELLO_S = 5.0  # a connection says hello at once
JOIN_S = 60.0  # all ranks are here when they begin to connect
LOCAL_BUFFER = 1 << 20  # bytes that a follower of this host may be behind, as far as the kernel allows
# A host without power, or out of reach, is lost after 25 s, whether something was sent or not.
KEEPALIVE = {socket.TCP_KEEPIDLE: 10, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3, socket.TCP_USER_TIMEOUT: 25_000}

Address = bytes | tuple[str, int]  # of a Unix socket, which has no file, or of TCP


class RankLost(RuntimeError):
    """Another rank has ended; the message names it."""


class RankConnection:
    def __init__(self, rank: int, connection: socket.socket) -> None:
        self.rank, self._socket = rank, connection
        connection.settimeout(None)
        if connection.family == socket.AF_UNIX:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER)
            return
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in {socket.TCP_NODELAY: 1, **KEEPALIVE}.items():
            connection.setsockopt(socket.IPPROTO_TCP, option, value)

    def send(self, data: bytes | bytearray) -> None:
        """Raises RankLost."""
        try:
            self._socket.sendall(data)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, nbytes: int) -> bytes:
        """Waits as long as the other rank lives. Raises RankLost, also when the message is cut short."""
        data = b""
        while len(data) < nbytes:  # once, unless a signal comes
            try:
                more = self._socket.recv(nbytes - len(data), socket.MSG_WAITALL)
            except OSError as error:
                raise self._lost(error) from error
            if not more:
                raise RankLost(f"rank {self.rank} has ended, or lost its connection")
            data += more
        return data

    def receive_message(self) -> bytes:
        """What `framed` made. Waits as long as the other rank lives. Raises RankLost."""
        (size,) = FRAME.unpack(self.receive(FRAME.size))
        return self.receive(size)

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def _lost(self, error: OSError) -> RankLost:
        return RankLost(f"rank {self.rank} has ended, or lost its connection: {error}")


class RankListener:
    def __init__(self, address: str = "") -> None:
        """At any free port of `address`; without one, for ranks of this host alone."""
        self.address: Address
        if address:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            self._socket = socket.create_server((address, 0), family=family, backlog=1024)
            self.address = address, self._socket.getsockname()[1]
        else:
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind("")  # Linux finds a name that is free in the network namespace
            self._socket.listen(1024)
            self.address = self._socket.getsockname()

    def accept(self, token: bytes, ranks: Collection[int]) -> list[RankConnection]:
        """Links to these ranks, in any order. Raises RankLost when one does not connect."""
        links: dict[int, RankConnection] = {}
        end = time.monotonic() + JOIN_S
        while missing := sorted(set(ranks) - links.keys()):
            self._socket.settimeout(max(end - time.monotonic(), 0.001))
            try:
                connection, peer = self._socket.accept()
            except TimeoutError as error:
                raise RankLost(f"rank {missing[0]} did not connect within {JOIN_S:g} s") from error
            rank = _hello(connection, token)
            if rank in missing:
                links[rank] = RankConnection(rank, connection)
            else:
                message = "refused a connection from %s: it is not one of this worker's ranks"
                log.warning(message, peer or "this host", extra=PER_REQUEST)
                connection.close()
        return list(links.values())

    def close(self) -> None:
        self._socket.close()


def framed(data: bytes | bytearray) -> bytes:
    """A message of any size for `receive_message`: made once for all who get it."""
    return FRAME.pack(len(data)) + data


def connect(address: Address, token: bytes, me: int, rank: int) -> RankConnection:
    """The link of rank `me` to the listener of `rank`. Raises RankLost."""
    try:
        connection = _dial(address)
    except OSError as error:
        raise RankLost(f"rank {rank} at {address!r} cannot be reached: {error}") from error
    link = RankConnection(rank, connection)
    link.send(HELLO.pack(token, me))
    return link


def _dial(address: Address) -> socket.socket:
    if isinstance(address, tuple):
        return socket.create_connection(address, timeout=JOIN_S)
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(JOIN_S)
    connection.connect(address)
    return connection


def _hello(connection: socket.socket, token: bytes) -> int:
    """The rank that it is from; -1: of a stranger."""
    connection.settimeout(HELLO_S)
    try:
        said = connection.recv(HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return -1
    if len(said) < HELLO.size:
        return -1
    told, rank = HELLO.unpack(said)
    return int(rank) if hmac.compare_digest(told, token) else -1
