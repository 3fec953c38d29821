"""What every server of ours gives: health, reflection, prompt clean-up, a clear error for a taken port."""

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc._cython import cygrpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from millrace.v1 import inference_pb2
from millrace_rpc import server as rpc_server
from millrace_rpc.client import CHANNEL_OPTIONS, channel
from millrace_rpc.health import NOT_SERVING, SERVING, UNKNOWN
from millrace_rpc.server import Server

NAME = "millrace.v1.Inference"


async def health_of(channel: grpc.aio.Channel, service: str) -> int:
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service))).status


@pytest.mark.parametrize("service", ["", NAME])
async def test_health_follows_set_serving(running, service: str) -> None:
    assert await health_of(running.channel, service) == NOT_SERVING
    running.server.set_serving(True)
    assert await health_of(running.channel, service) == SERVING
    running.server.set_serving(False)
    assert await health_of(running.channel, service) == NOT_SERVING


async def test_reflection_lists_services_and_describes_messages(running) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
    ask = reflection_pb2.ServerReflectionRequest
    requests = [ask(list_services=""), ask(file_containing_symbol="millrace.v1.GenerateRequest")]
    listed, described = [answer async for answer in stub.ServerReflectionInfo(iter(requests))]
    names = {service.name for service in listed.list_services_response.service}
    assert {NAME, "grpc.health.v1.Health"} <= names
    assert described.file_descriptor_response.file_descriptor_proto


async def test_client_that_stops_reading_and_leaves_closes_the_handler(running) -> None:
    call = running.stub.Generate(inference_pb2.GenerateRequest())
    await call.read()
    await asyncio.sleep(0.05)  # the handler now waits in a send, for lack of window
    assert not running.service.closed.is_set()
    call.cancel()
    await running.service.closed.wait()


async def test_stop_ends_open_streams(running) -> None:
    call = running.stub.Generate(inference_pb2.GenerateRequest())
    await call.read()
    await running.server.stop(0)
    await running.service.closed.wait()


async def test_taken_port_is_an_oserror_with_the_address(running) -> None:
    address = f"127.0.0.1:{running.server.port}"
    with pytest.raises(OSError, match=address):
        await Server([NAME]).start(address)


async def test_messages_up_to_the_limit_pass(running) -> None:
    prompt = inference_pb2.Prompt(text="x" * (rpc_server.MAX_MESSAGE_BYTES - 1024))
    answer = await running.stub.Tokenize(inference_pb2.TokenizeRequest(prompt=prompt))
    assert list(answer.token_ids) == [1, 2]


def test_run_uses_uvloop_and_returns_after_main() -> None:
    seen = []

    async def main() -> None:
        seen.append(type(asyncio.get_running_loop()).__module__)

    rpc_server.run(main())
    assert seen == ["uvloop"]


@pytest.mark.parametrize("name", sorted({name for name, _ in [*rpc_server.SERVER_OPTIONS, *CHANNEL_OPTIONS]}))
def test_every_option_is_known_to_grpc(name: str) -> None:
    """It ignores others in silence: a misspelt ping interval once made servers hang up on idle clients after 30 s."""
    assert name.encode() + b"\0" in Path(cygrpc.__file__).read_bytes()


# ------------------------------------------------------------------------------------- health


async def heard(call: grpc.aio.UnaryStreamCall) -> int:
    return (await call.read()).status


def watch(ch: grpc.aio.Channel, service: str = "") -> grpc.aio.UnaryStreamCall:
    return health_pb2_grpc.HealthStub(ch).Watch(health_pb2.HealthCheckRequest(service=service))


async def test_a_watcher_that_leaves_takes_nothing_from_the_others(running) -> None:
    async with channel(f"127.0.0.1:{running.server.port}") as ch:
        stays, leaves = watch(ch), watch(ch)
        assert [await heard(stays), await heard(leaves)] == [NOT_SERVING, NOT_SERVING]
        leaves.cancel()
        later = watch(ch)  # after the one that left
        assert await heard(later) == NOT_SERVING
        for serving, status in ((True, SERVING), (False, NOT_SERVING)):
            running.server.set_serving(serving)
            assert [await heard(stays), await heard(later)] == [status, status]


async def test_what_changes_nothing_is_not_told(running) -> None:
    async with channel(f"127.0.0.1:{running.server.port}") as ch:
        call = watch(ch)
        assert await heard(call) == NOT_SERVING
        running.server.set_serving(False)
        running.server.set_serving(True)
        assert await heard(call) == SERVING


async def test_an_unknown_service_is_said_to_be_unknown(running) -> None:
    async with channel(f"127.0.0.1:{running.server.port}") as ch:
        assert await heard(watch(ch, "millrace.v1.Nothing")) == UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError, match=r"no service 'millrace\.v1\.Nothing'") as caught:
            await health_pb2_grpc.HealthStub(ch).Check(health_pb2.HealthCheckRequest(service="millrace.v1.Nothing"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
