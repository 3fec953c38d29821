"""A decode worker of another version beside a prefill worker of ours: one message, no read, and both go on."""

from __future__ import annotations

import struct
from pathlib import Path

import grpc
import pytest
from millrace.v1 import worker_pb2
from millrace_common.reasons import Reason
from millrace_common.versions import WORKER_API
from millrace_rpc.errors import from_rpc_error
from millrace_testing.fake_router import FakePair, request
from millrace_testing.later import later
from millrace_testing.procs import SIM, Worker, workers
from millrace_testing.sim import expected, prompt_of


@pytest.mark.parametrize("step", [-1, 1], ids=["older", "newer"])
async def test_a_pair_of_two_versions_is_refused(step: int, tmp_path: Path) -> None:
    """Of the pages, and of the workers' API, whichever way a router brings the two together."""
    pages, api = {"KV_PROTOCOL": step}, {"WORKER_API": step}
    others = [Worker("decode", tmp_path, SIM, versions=versions) for versions in (pages, api)]
    async with workers(tmp_path, "prefill", "decode") as [prefill, decode]:
        try:
            for other in others:
                await other.start()
                await other.ready()
            fingerprint = (await decode.info()).layout.fingerprint
            assert [(await one.info()).protocol - WORKER_API for one in others] == [0, step]
            assert [(await one.info()).layout.fingerprint == fingerprint for one in others] == [False, True]
            source = await prefill.source()
            for other, says in zip(others, ("KV layout ", f"has version {WORKER_API} of the worker API"), strict=True):
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await other.stub.Warmup(worker_pb2.WarmupRequest(source=source), timeout=20)
                error = from_rpc_error(caught.value)
                assert error.reason is Reason.LAYOUT_MISMATCH and says in error.message
            async with FakePair(prefill, others[0]) as pair:
                for length in (3, 300):
                    bad = pair.submit(request(prompt_of(length)))
                    end = await pair.to_decode.finish(bad)
                    assert end.failure.reason == Reason.LAYOUT_MISMATCH and not end.token_ids
                    pair.to_prefill.abort(bad)
            for one in (prefill, others[0]):
                await one.whole()
            async with FakePair(prefill, decode) as pair:
                good = pair.submit(request(prompt_of(300)))
                await pair.to_decode.finish(good)
                assert pair.to_decode.tokens(good) == expected(list(good.token_ids), 8)
        finally:
            for other in others:
                await other.close()


async def test_a_router_of_a_later_version(tmp_path: Path) -> None:
    """What it says has fields that are unknown here."""
    async with workers(tmp_path, "prefill", "decode") as [prefill, decode]:
        source = later(await prefill.source())
        await decode.stub.Warmup(later(worker_pb2.WarmupRequest(source=source)), timeout=20)
        async with FakePair(prefill, decode) as pair:
            pair.source = source
            one = pair.submit(later(request(prompt_of(300), temperature=0.0)))
            await pair.to_decode.finish(one)
            assert pair.to_decode.tokens(one) == expected(list(one.token_ids), 8)
        await decode.whole()


async def test_routers_of_this_version_and_of_the_one_before(tmp_path: Path) -> None:
    """The later one sends token ids as bytes, because the worker says that it takes them."""
    async with workers(tmp_path, "prefill", "decode") as [prefill, decode]:
        assert (await prefill.info()).packed_prompts and (await decode.info()).packed_prompts
        async with FakePair(prefill, decode) as pair:
            pair.source = await prefill.source()
            for packed in (False, True):
                prompt = prompt_of(300)
                one = request(() if packed else prompt)
                one.prompt = struct.pack(f"<{len(prompt)}I", *prompt) if packed else b""
                pair.submit(one)
                await pair.to_decode.finish(one)
                assert pair.to_decode.tokens(one) == expected(prompt, 8)
        await decode.whole()
