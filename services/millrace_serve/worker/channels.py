"""Typed one-way message channels between the processes of a worker: ZeroMQ PUSH/PULL with msgpack.

A Unix socket lies in a folder of ours. Over TCP the two ends need one key (CURVE): others can neither send nor read,
and what was sent once cannot be sent again. What a receiver cannot decode is dropped.

Sending never blocks: messages for a slow receiver are queued without limit, because the engine's admission already
limits the work in flight. A socket belongs to one thread.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
from millrace_common import deployment_secret
from zmq.utils import z85

log = logging.getLogger(__name__)
T = TypeVar("T")

SHORTEST_POLL_S = 1e-3  # ZeroMQ counts in milliseconds: a shorter wait is a sleep that no message ends
LONGEST_POLL_S = 3600.0  # and in 31 bits, which a deadline may exceed
BATCH = 256  # messages that a reader callback takes before other callbacks run


def channel_key(secret: Path | None, group: str) -> bytes:
    """Of the channels of one start of a worker's ranks. Raises OSError when the secret is unusable.

    Args:
        secret: file of the deployment's secret. None: whoever knows `group` has the key.
        group: another one for each start.
    """
    return deployment_secret.derive(deployment_secret.read(secret), "rank channels", group)


Context = zmq.Context[Any]  # Any: pyzmq has no type for an option that is bytes


class Sender(Generic[T]):
    def __init__(self, context: Context, endpoint: str, key: bytes = b"") -> None:
        """key: 32 bytes; for TCP only."""
        self._socket = _socket(context, zmq.PUSH, endpoint, key)
        self._socket.set(zmq.LINGER, 500)  # ms; last words of a rank
        self._socket.connect(endpoint)
        self._encode = msgspec.msgpack.Encoder().encode

    def send(self, message: T) -> None:
        self._socket.send(self._encode(message), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


class Receiver(Generic[T]):
    """`bind` is an endpoint such as ipc:///tmp/x/rank0 or tcp://10.0.0.1:*; `endpoint` is what senders connect to."""

    def __init__(
        self,
        context: Context,
        bind: str,
        kind: object,  # of messages: a class or a union of classes
        key: bytes = b"",
        on_undecodable: Callable[[], None] = lambda: None,
    ) -> None:
        """key: 32 bytes; for TCP only. on_undecodable: called where messages are taken."""
        self._socket = _socket(context, zmq.PULL, bind, key)
        self._socket.bind(bind)
        self.endpoint: str = self._socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self._decode = msgspec.msgpack.Decoder(kind).decode
        self._on_undecodable = on_undecodable
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_message: Callable[[T], None] | None = None

    def receive(self, wait_s: float | None = 0.0, fds: Sequence[int] = ()) -> list[T]:
        """Return all queued messages; waits up to `wait_s` (None: for ever), or LONGEST_POLL_S if that is less, for the
        first one, or until one of `fds` is readable.
        """
        if wait_s is None:
            self._poll(None, fds)
        elif 0 < wait_s < SHORTEST_POLL_S:
            time.sleep(wait_s)
        elif wait_s:
            self._poll(int(min(wait_s, LONGEST_POLL_S) * 1000), fds)
        messages: list[T] = []
        while (message := self._take()) is not None:
            messages.append(message)
        return messages

    def watch(self, on_message: Callable[[T], None]) -> None:
        """Call `on_message` on the running event loop for every message."""
        self._loop, self._on_message = asyncio.get_running_loop(), on_message
        self._loop.add_reader(self._socket.fileno(), self._readable)
        self._loop.call_soon(self._readable)

    def _readable(self) -> None:
        # The descriptor is edge-triggered: it signals again only after the socket was read empty.
        assert self._loop is not None and self._on_message is not None
        for _ in range(BATCH):
            if self._socket.closed or (message := self._take()) is None:
                return
            self._on_message(message)
        self._loop.call_soon(self._readable)

    def close(self) -> None:
        if self._loop is not None and not self._socket.closed:
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _poll(self, timeout_ms: int | None, fds: Sequence[int]) -> None:
        poller = zmq.Poller()
        for source in (self._socket, *fds):
            poller.register(source, zmq.POLLIN)
        poller.poll(timeout_ms)

    def _take(self) -> T | None:
        while True:
            try:
                return self._decode(self._socket.recv(zmq.NOBLOCK))
            except zmq.Again:
                return None
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                log.warning("dropped a message that cannot be decoded: %s", error)
                self._on_undecodable()


def _socket(context: Context, kind: int, endpoint: str, key: bytes) -> Any:  # as of Context
    """In CURVE the clients demand the server's key, so the sender is the server, whichever side connects."""
    socket = context.socket(kind)
    socket.set(zmq.LINGER, 0)
    socket.set_hwm(0)
    socket.set(zmq.IPV6, "[" in endpoint)  # otherwise ZeroMQ takes the address for a device
    if not endpoint.startswith("tcp:"):
        return socket
    assert key, f"{endpoint} needs a key"
    secret = z85.encode(key)
    public = zmq.curve_public(secret)
    socket.set(zmq.CURVE_SECRETKEY, secret)
    if kind == zmq.PUSH:
        socket.set(zmq.CURVE_SERVER, 1)
    else:
        socket.set(zmq.CURVE_PUBLICKEY, public)
        socket.set(zmq.CURVE_SERVERKEY, public)
    return socket
