import asyncio
import itertools
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from millrace_serve.engine.core import Abort, LeaseEnded, RequestId
from millrace_serve.engine.health.rank_watch import RankHeartbeat
from millrace_serve.worker import channels
from millrace_serve.worker.channels import Receiver, Sender, channel_key
from millrace_serve.worker.messages import FreezeGc, FromRank, RankFailed, Stop, ToEngine
from millrace_testing import HANG_S
from millrace_testing.examples import examples
from millrace_testing.ipv6 import needs_ipv6
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

KEY, OTHER_KEY = channel_key(None, "this start"), channel_key(None, "another start")
MESSAGES = [Abort(RequestId(2**64 - 1, 1)), LeaseEnded(RequestId(1, 0)), FreezeGc(), Stop()]


@pytest.fixture(params=["ipc", "tcp://127.0.0.1:*", pytest.param("tcp://[::1]:*", marks=needs_ipv6)])
def pair(request, tmp_path: Path):  # type: ignore[no-untyped-def]
    context = zmq.Context()
    bind = f"ipc://{tmp_path}/s" if request.param == "ipc" else request.param
    receiver: Receiver[ToEngine] = Receiver(context, bind, ToEngine, KEY)
    sender: Sender[ToEngine] = Sender(context, receiver.endpoint, KEY)
    yield sender, receiver
    receiver.close()
    context.destroy(linger=0)


def test_messages_arrive_typed_and_in_order(pair) -> None:  # type: ignore[no-untyped-def]
    sender, receiver = pair
    for message in MESSAGES:
        sender.send(message)
    received: list[ToEngine] = []
    while len(received) < len(MESSAGES):
        received += receiver.receive(5.0)
    assert received == MESSAGES


@pytest.mark.parametrize("wait_s", [2.0**31 / 1000, 1e7, (2**32 - 1) / 1000, 1e30, float("inf")])
def test_wait_of_any_length_ends_with_a_message(pair, wait_s: float) -> None:  # type: ignore[no-untyped-def]
    """A poll counts milliseconds in 31 bits; a request's deadline has 32."""
    sender, receiver = pair
    sender.send(MESSAGES[0])
    assert receiver.receive(wait_s) == MESSAGES[:1]


def test_receive_returns_when_nothing_comes(pair) -> None:  # type: ignore[no-untyped-def]
    _, receiver = pair
    assert receiver.receive() == [] and receiver.receive(0.001) == []


async def test_watched_channel_loses_nothing_in_a_burst(pair) -> None:  # type: ignore[no-untyped-def]
    """The descriptor is edge-triggered: more than a batch at once must not get stuck."""
    sender, receiver = pair
    received, total, turns = list[ToEngine](), 3 * channels.BATCH + 1, list[int]()
    loop, done = asyncio.get_running_loop(), asyncio.Event()

    def take(message: ToEngine) -> None:
        if not received:
            loop.call_soon(lambda: turns.append(len(received)))
        received.append(message)
        if len(received) == total:
            done.set()

    for room in range(total):
        sender.send(Abort(RequestId(room, 0)))
    assert receiver._socket.poll(20_000)
    receiver.watch(take)
    await asyncio.wait_for(done.wait(), HANG_S)
    assert [message.id.room for message in received] == list(range(total))  # type: ignore[union-attr]
    assert turns[0] <= channels.BATCH, "others have a turn behind a batch"


# ------------------------------------------------------------------------------------------------ strangers


class Recorder:
    """A TCP proxy before `port`, and what was sent to it."""

    def __init__(self, port: int) -> None:
        self.sent = bytearray()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"tcp://127.0.0.1:{self._server.getsockname()[1]}"
        self._target = socket.create_connection(("127.0.0.1", port))
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        client, _ = self._server.accept()
        back = threading.Thread(target=self._copy, args=(self._target, client, bytearray()), daemon=True)
        back.start()
        self._copy(client, self._target, self.sent)

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket, seen: bytearray) -> None:
        while data := source.recv(1 << 16):
            seen += data
            target.sendall(data)


class Frontend:
    """The end of a group's channel that takes the ranks' reports."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.context = context
        self.undecodable = 0
        self.receiver: Receiver[FromRank] = Receiver(
            context, "tcp://127.0.0.1:*", FromRank, KEY, lambda: setattr(self, "undecodable", self.undecodable + 1)
        )
        self.port = int(self.receiver.endpoint.rpartition(":")[2])

    def hears(self) -> list[FromRank]:
        """What has come before a message of the rank that is sent now."""
        rank: Sender[FromRank] = Sender(self.context, self.receiver.endpoint, KEY)
        rank.send(FromRank(0, RankHeartbeat(7, True, 0, 1.0, "")))
        heard: list[FromRank] = []
        while not heard or heard[-1].report != RankHeartbeat(7, True, 0, 1.0, ""):
            heard += (new := self.receiver.receive(20.0))
            assert new, "the rank is not heard any more"
        rank.close()
        return heard[:-1]


@pytest.fixture
def frontend() -> Iterator[Frontend]:
    context: zmq.Context[Any] = zmq.Context()
    frontend = Frontend(context)
    yield frontend
    frontend.receiver.close()
    context.destroy(linger=0)


LAST_WORDS = FromRank(0, RankFailed("I am a stranger"))  # which end the worker
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01"  # of ZMTP 3.1
NULL, CURVE = (GREETING + mechanism.ljust(20, b"\0") + bytes(32) for mechanism in (b"NULL", b"CURVE"))


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(b"GET / HTTP/1.1\r\n\r\n", id="http"),
        pytest.param(bytes(range(256)) * 64, id="bytes"),
        pytest.param(NULL + b"\x04\x1a\x05READY\x0bSocket-Type\0\0\0\x04PUSH", id="without a mechanism"),
        pytest.param(CURVE + b"\x04\xc8\x05HELLO" + bytes(194), id="an empty hello"),
        pytest.param(CURVE + b"\x06" + b"\xff" * 8, id="a command without end"),
    ],
)
def test_raw_peer_is_not_heard_and_disturbs_nobody(frontend: Frontend, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", frontend.port)) as stranger:
        stranger.sendall(sent)
        assert frontend.hears() == []


@pytest.mark.parametrize("what", ["no key", "another key", "a client with the public key", "the public key alone"])
def test_well_formed_message_without_the_key_is_not_heard(frontend: Frontend, what: str) -> None:
    """The stranger's socket says when it was turned away."""
    stranger = frontend.context.socket(zmq.PUSH)
    stranger.set(zmq.LINGER, 0)
    public, secret = zmq.curve_keypair()
    match what:
        case "another key":
            stranger.set(zmq.CURVE_SERVER, 1)
            stranger.set(zmq.CURVE_SECRETKEY, z85.encode(OTHER_KEY))
        case "a client with the public key":
            stranger.set(zmq.CURVE_SERVERKEY, zmq.curve_public(z85.encode(KEY)))
            stranger.set(zmq.CURVE_PUBLICKEY, public)
            stranger.set(zmq.CURVE_SECRETKEY, secret)
        case "the public key alone":
            stranger.set(zmq.CURVE_SERVER, 1)
            stranger.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(z85.encode(KEY)))
            stranger.set(zmq.CURVE_SECRETKEY, secret)
    events = stranger.get_monitor_socket()
    stranger.connect(frontend.receiver.endpoint)
    stranger.send(msgspec.msgpack.encode(LAST_WORDS), zmq.NOBLOCK)
    ends = {zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL}
    while (event := recv_monitor_message(events)["event"]) not in ends:
        assert event != zmq.EVENT_HANDSHAKE_SUCCEEDED
    assert frontend.hears() == []
    stranger.disable_monitor()


def test_what_was_sent_once_cannot_be_sent_again(frontend: Frontend) -> None:
    recorder = Recorder(frontend.port)
    rank: Sender[FromRank] = Sender(frontend.context, recorder.endpoint, KEY)
    rank.send(LAST_WORDS)
    assert frontend.receiver.receive(20.0) == [LAST_WORDS]
    with socket.create_connection(("127.0.0.1", frontend.port)) as stranger:
        stranger.sendall(recorder.sent)
        while stranger.recv(1 << 16):  # until the receiver has had enough
            pass
        assert frontend.hears() == []
    assert b"I am a stranger" not in recorder.sent, "others cannot read it either"


@pytest.mark.parametrize("key", [b"", OTHER_KEY])
def test_stranger_at_a_ranks_address_learns_nothing(frontend: Frontend, key: bytes) -> None:
    """It had the address before the rank, or took it."""
    stranger = frontend.context.socket(zmq.PULL)
    if key:
        secret = z85.encode(key)
        for option, value in ((zmq.CURVE_SERVERKEY, zmq.curve_public(secret)), (zmq.CURVE_SECRETKEY, secret)):
            stranger.set(option, value)
        stranger.set(zmq.CURVE_PUBLICKEY, zmq.curve_public(secret))
    port = stranger.bind_to_random_port("tcp://127.0.0.1")
    events = stranger.get_monitor_socket()
    sender: Sender[FromRank] = Sender(frontend.context, f"tcp://127.0.0.1:{port}", KEY)
    sender.send(LAST_WORDS)
    ends = {zmq.EVENT_DISCONNECTED, zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL}
    while recv_monitor_message(events)["event"] not in ends:
        pass
    assert not stranger.poll(0)
    stranger.disable_monitor()


def test_no_tcp_channel_goes_without_a_key(tmp_path: Path) -> None:
    context: zmq.Context[Any] = zmq.Context()
    for make in (
        lambda: Receiver(context, "tcp://127.0.0.1:*", ToEngine),
        lambda: Sender(context, "tcp://127.0.0.1:1"),
    ):
        with pytest.raises(AssertionError, match="needs a key"):
            make()
    context.destroy(linger=0)


def test_keys_differ_with_the_start_and_with_the_secret(tmp_path: Path) -> None:
    files: list[Path | None] = [None]
    for name in "ab":
        files.append(tmp_path / name)
        (tmp_path / name).write_text(name * 32)
    keys = {channel_key(secret, group) for secret, group in itertools.product(files, ("1", "2"))}
    assert len(keys) == 6 and {len(key) for key in keys} == {32}
    (tmp_path / "a").unlink()
    with pytest.raises(OSError, match="No such file"):
        channel_key(tmp_path / "a", "1")


VALID = [
    msgspec.msgpack.encode(message)
    for message in (LAST_WORDS, FromRank(2, RankHeartbeat(1, True, 3, 0.5, "x", {"y": 1})))
]
DEEP = b"\x92\x00" + b"\x81\xa1a" * 5000 + b"\x00"


@examples(50)
@given(st.one_of(st.binary(max_size=60), st.tuples(st.sampled_from(VALID), st.integers(0, 80), st.binary(max_size=3))))
def test_what_cannot_be_decoded_is_dropped_and_counted(sent: Any) -> None:
    if isinstance(sent, tuple):
        valid, place, put = sent
        sent = valid[:place] + put + valid[place + len(put) :]
    check_dropped(sent)


def test_message_of_any_depth_is_dropped() -> None:
    check_dropped(DEEP)


def check_dropped(sent: bytes) -> None:
    """Or taken, if it is a message; the one behind it is taken."""
    context: zmq.Context[Any] = zmq.Context()
    dropped: list[None] = []
    name = f"inproc://{os.urandom(8).hex()}"
    receiver: Receiver[FromRank] = Receiver(context, name, FromRank, b"", lambda: dropped.append(None))
    raw = context.socket(zmq.PUSH)
    raw.connect(name)
    for message in (sent, VALID[0]):
        raw.send(message)
    received = receiver.receive(20.0)
    assert received[-1] == LAST_WORDS and len(received) + len(dropped) == 2
    context.destroy(linger=0)
