"""Who watches the health of a service hears of every change, whoever else watches."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from millrace_rpc.client import channel
from millrace_rpc.health import NOT_SERVING, SERVING, UNKNOWN


async def heard(call: grpc.aio.UnaryStreamCall) -> int:
    return (await asyncio.wait_for(call.read(), 120)).status


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
