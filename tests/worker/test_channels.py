import asyncio
from pathlib import Path

import pytest
import zmq
from millrace_serve.engine.core import Abort, LeaseEnded, RequestId
from millrace_serve.worker import channels
from millrace_serve.worker.channels import Receiver, Sender
from millrace_serve.worker.messages import FreezeGc, Stop, ToEngine
from millrace_testing.ipv6 import needs_ipv6

MESSAGES = [Abort(RequestId(2**64 - 1, 1)), LeaseEnded(RequestId(1, 0)), FreezeGc(), Stop()]


@pytest.fixture(params=["ipc", "tcp://127.0.0.1:*", pytest.param("tcp://[::1]:*", marks=needs_ipv6)])
def pair(request, tmp_path: Path):  # type: ignore[no-untyped-def]
    context = zmq.Context()
    bind = f"ipc://{tmp_path}/s" if request.param == "ipc" else request.param
    receiver: Receiver[ToEngine] = Receiver(context, bind, ToEngine)
    sender: Sender[ToEngine] = Sender(context, receiver.endpoint)
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
def test_a_wait_of_any_length_ends_with_a_message(pair, wait_s: float) -> None:  # type: ignore[no-untyped-def]
    """A poll counts milliseconds in 31 bits; a request's deadline has 32."""
    sender, receiver = pair
    sender.send(MESSAGES[0])
    assert receiver.receive(wait_s) == MESSAGES[:1]


def test_receive_returns_when_nothing_comes(pair) -> None:  # type: ignore[no-untyped-def]
    _, receiver = pair
    assert receiver.receive() == [] and receiver.receive(0.001) == []


async def test_a_watched_channel_loses_nothing_in_a_burst(pair) -> None:  # type: ignore[no-untyped-def]
    """The descriptor is edge-triggered: more than a batch at once must not get stuck."""
    sender, receiver = pair
    received: list[ToEngine] = []
    receiver.watch(received.append)
    total = 3 * channels.BATCH + 1
    for room in range(total):
        sender.send(Abort(RequestId(room, 0)))
        if room % 100 == 0:
            await asyncio.sleep(0)
    async with asyncio.timeout(10):
        while len(received) < total:
            await asyncio.sleep(0.001)
    assert [message.id.room for message in received] == list(range(total))  # type: ignore[union-attr]
