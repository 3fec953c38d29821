"""A decode worker of another version beside a prefill worker of ours: one message, no read, and both go on."""

import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from millrace.v1 import worker_pb2
from millrace_common.reasons import Reason
from millrace_common.versions import MOST_REPLICAS, WORKER_API
from millrace_rpc.errors import MillraceError, from_rpc_error
from millrace_serve.handover.pairing import check_pair
from millrace_testing.fake_router import FakePair, request
from millrace_testing.inside import Inside, inside
from millrace_testing.later import later
from millrace_testing.procs import SIM, Worker
from millrace_testing.shared import shared
from millrace_testing.sim import expected, prompt_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


pair = shared(lambda: inside("prefill", "decode"))


@pytest.mark.parametrize("step", [-1, 0, 1])
async def test_pair_of_api_versions_must_be_equal(step: int) -> None:
    ranks: Any = SimpleNamespace(ready_info=SimpleNamespace(layout=SimpleNamespace(fingerprint="f")))
    source = worker_pb2.KvSourceRef(address="a:1", epoch="e", fingerprint="f")
    info = worker_pb2.WorkerInfo(epoch="e", protocol=WORKER_API + step, layout={"fingerprint": "f"})
    if step == 0:
        check_pair(info, source, ranks)
        return
    with pytest.raises(MillraceError, match=f"a:1 has version {WORKER_API + step} of the worker API") as caught:
        check_pair(info, source, ranks)
    assert caught.value.reason is Reason.LAYOUT_MISMATCH
    info.protocol, info.replicas = WORKER_API, 2**32 - 1  # each with each of ours would be a list
    with pytest.raises(MillraceError, match=f"replicas of a:1 is {info.replicas}; the limit is {MOST_REPLICAS}"):
        check_pair(info, source, ranks)


@pytest.mark.long
async def test_workers_of_a_later_version_are_refused_and_others_go_on(pair: list[Inside], tmp_path: Path) -> None:
    """Of pages and of the workers' API, whichever way a router brings the two together."""
    prefill, decode = pair
    other = Worker("decode", tmp_path, SIM, versions={"KV_PROTOCOL": 1, "WORKER_API": 1})
    try:
        await other.start()
        await other.ready()
        assert (await other.info()).protocol == WORKER_API + 1
        assert (await other.info()).layout.fingerprint != (await decode.info()).layout.fingerprint
        with pytest.raises(grpc.aio.AioRpcError, match=f"has version {WORKER_API} of the worker API") as caught:
            await other.stub.Warmup(worker_pb2.WarmupRequest(source=await prefill.source()))
        assert from_rpc_error(caught.value).reason is Reason.LAYOUT_MISMATCH
        async with FakePair(prefill, other) as both:
            for length in (3, 300):
                bad = both.submit(request(prompt_of(length)))
                end = await both.to_decode.finish(bad)
                assert end.failure.reason == Reason.LAYOUT_MISMATCH and not end.token_ids
                both.to_prefill.abort(bad)
        for one in (prefill, other):
            await one.whole()
    finally:
        await other.close()


async def test_router_of_a_later_version_is_served(pair: list[Inside]) -> None:
    """What it says has fields that are unknown here."""
    prefill, decode = pair
    source = later(await prefill.source())
    await decode.stub.Warmup(later(worker_pb2.WarmupRequest(source=source)))
    async with FakePair(prefill, decode) as both:
        both.source = source
        one = both.submit(later(request(prompt_of(300), temperature=0.0)))
        await both.to_decode.finish(one)
        assert both.to_decode.tokens(one) == expected(list(one.token_ids), 8)
    await decode.whole()


async def test_routers_of_this_version_and_of_the_one_before(pair: list[Inside]) -> None:
    """The later one sends token ids as bytes, because the worker says that it takes them."""
    prefill, decode = pair
    assert (await prefill.info()).packed_prompts and (await decode.info()).packed_prompts
    async with FakePair(prefill, decode) as both:
        both.source = await prefill.source()
        for packed in (False, True):
            prompt = prompt_of(300)
            one = request(() if packed else prompt)
            one.prompt = struct.pack(f"<{len(prompt)}I", *prompt) if packed else b""
            both.submit(one)
            await both.to_decode.finish(one)
            assert both.to_decode.tokens(one) == expected(prompt, 8)
    await decode.whole()
