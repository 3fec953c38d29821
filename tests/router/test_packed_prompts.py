"""A router packs the token ids of a prompt for workers that say that they take it so, and for no others."""

import struct
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from millrace.v1 import worker_pb2
from router.fake_worker import DECODE, PREFILL, FakeWorker, expected, normal

PROMPT = [70, 71, 2]


class PackedWorker(FakeWorker):
    async def GetInfo(self, request: Any, context: Any) -> worker_pb2.WorkerInfo:
        info = await super().GetInfo(request, context)
        info.packed_prompts = True
        return info


async def unpacked(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator[worker_pb2.SequenceOutput]:
    assert not request.token_ids
    request.token_ids.extend(struct.unpack(f"<{len(request.prompt) // 4}I", request.prompt))
    async for output in normal(worker, request):
        yield output


@pytest.mark.parametrize("packed", [PREFILL, DECODE])
async def test_a_pair_of_two_versions_gets_the_same_prompt(packed: int, cluster: Callable[..., Any]) -> None:
    """During a roll-out one takes bytes and the other numbers."""
    workers = [PackedWorker(role) if role == packed else FakeWorker(role) for role in (PREFILL, DECODE)]
    for worker in workers:
        worker.script.append(unpacked if worker.role == packed else normal)
    made = await cluster(*workers)
    result = await made.generate(PROMPT)
    assert result.tokens() == expected(PROMPT, 8)
    assert [bool(worker.submitted[0].prompt) for worker in workers] == [role == packed for role in (PREFILL, DECODE)]
