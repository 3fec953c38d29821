"""Reading a stream that must not fall silent, and a channel to several routers."""

import asyncio
import time
from collections.abc import AsyncIterator
from unittest.mock import AsyncMock

import grpc
import pytest
from millrace.v1 import inference_pb2, inference_pb2_grpc
from millrace_common.reasons import Reason
from millrace_rpc.client import heard_within, reply, routers
from millrace_rpc.errors import MillraceError
from millrace_rpc.server import Server
from millrace_testing.dns import name_server


async def says(after_s: float) -> str:
    await asyncio.sleep(after_s)
    return "it"


async def test_silence_ends_the_reading() -> None:
    ended = asyncio.Event()

    async def silent() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(TimeoutError):
        await heard_within(0.02, silent())
    await ended.wait()


async def test_a_pause_of_our_own_is_not_the_peers_silence() -> None:
    reading = asyncio.create_task(heard_within(0.2, says(0.05)))
    await asyncio.sleep(0)
    time.sleep(0.25)
    assert await reading == "it"


async def test_a_silence_may_last_as_long_as_is_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """In slices, of which a pause of this process takes one at most."""
    waits: list[float] = []
    wait = asyncio.wait

    async def no_wait(tasks: set[asyncio.Task], timeout: float) -> object:
        waits.append(timeout)
        return await wait(tasks, timeout=0)

    monkeypatch.setattr(asyncio, "wait", no_wait)
    with pytest.raises(TimeoutError):
        await heard_within(8.0, asyncio.Event().wait())
    assert waits == [2.0] * 4


async def test_errors_and_cancellations_pass() -> None:
    with pytest.raises(OSError, match="broken"):
        await heard_within(5, AsyncMock(side_effect=OSError("broken"))())
    reading = asyncio.create_task(heard_within(5, says(5)))
    await asyncio.sleep(0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_call_that_ends_early() -> None:
    """A channel that is closed cancels its calls: that is a lost connection, and no cancellation of ours."""
    calls = [asyncio.get_running_loop().create_future() for _ in range(2)]
    lost, ours = (asyncio.create_task(reply(call)) for call in calls)
    await asyncio.sleep(0)
    calls[0].cancel()
    ours.cancel()
    with pytest.raises(MillraceError) as caught:
        await lost
    assert caught.value.reason is Reason.WORKER_LOST
    with pytest.raises(asyncio.CancelledError):
        await ours


class Router(inference_pb2_grpc.InferenceServicer):
    def __init__(self) -> None:
        self.calls = 0
        self.refuses = False
        self.breaks = False

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        self.calls += 1
        if self.refuses:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
        yield inference_pb2.GenerateResponse(token_ids=[1])
        if self.breaks:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "lost")


@pytest.fixture
async def pair() -> AsyncIterator[tuple[list[Router], list[Server], grpc.aio.Channel]]:
    """Two routers that serve, and a channel to both."""
    servicers, servers, ports = [Router(), Router()], [Server([]), Server([])], []
    for servicer, server in zip(servicers, servers, strict=True):
        inference_pb2_grpc.add_InferenceServicer_to_server(servicer, server.grpc)
        ports.append(await server.start("127.0.0.1:0"))
        server.set_serving(True)
    async with routers("ipv4:" + ",".join(f"127.0.0.1:{port}" for port in ports)) as ch:
        yield servicers, servers, ch
    for server in servers:
        await server.stop(0)


async def tokens(ch: grpc.aio.Channel) -> list[int]:
    call = inference_pb2_grpc.InferenceStub(ch).Generate(inference_pb2.GenerateRequest())
    return [token async for chunk in call for token in chunk.token_ids]


async def test_calls_go_round_and_are_made_again_elsewhere(pair: tuple) -> None:
    (first, second), _, ch = pair
    while not (first.calls and second.calls):
        assert await tokens(ch) == [1]
    first.refuses = True
    served, refused = second.calls, first.calls
    for _ in range(10):
        assert await tokens(ch) == [1]
    assert second.calls == served + 10 and first.calls > refused


async def test_a_router_that_is_not_serving_gets_no_calls(pair: tuple) -> None:
    (first, second), (server, _), ch = pair
    server.set_serving(False)
    known = -1
    while known != first.calls or not second.calls:  # until a round of calls goes to the other one only
        known = first.calls
        for _ in range(10):
            assert await tokens(ch) == [1]


async def test_a_call_with_output_is_not_made_again(pair: tuple) -> None:
    (first, second), _, ch = pair
    first.breaks = second.breaks = True
    with pytest.raises(grpc.aio.AioRpcError, match="lost"):
        await tokens(ch)
    assert first.calls + second.calls == 1


async def test_routers_whose_addresses_change_are_found_soon() -> None:
    """A roll-out gives each router another address, several times in a few seconds."""
    async with name_server() as dns:
        dns.addresses["routers.test"], server, port = "127.0.0.2", None, 0
        for address in ("127.0.0.2", "127.0.0.3", "127.0.0.4"):
            if server is not None:
                await server.stop(0)
            server, dns.addresses["routers.test"] = Server([]), address
            inference_pb2_grpc.add_InferenceServicer_to_server(Router(), server.grpc)
            port = await server.start(f"{address}:{port}")
            server.set_serving(True)
            if address == "127.0.0.2":
                ch = routers(dns.target("routers.test", port))
            began = len(dns.asked)
            while await served(ch) != [1]:
                await asyncio.sleep(0.1)
            assert len(dns.asked) > began or address == "127.0.0.2"
        await ch.close()
        assert server is not None
        await server.stop(0)


async def served(ch: grpc.aio.Channel) -> list[int] | None:
    try:
        return await tokens(ch)
    except grpc.aio.AioRpcError:
        return None
