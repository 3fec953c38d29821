"""Ranks that compute together, one of which is killed or stopped in the middle of a step: the router hears which one it
was, the worker ends, and no process of it is left, not even the rank that is stopped.
"""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet
from millrace_common.reasons import Reason
from millrace_rpc.errors import from_rpc_error
from millrace_testing.fake_router import FakeLink, request
from millrace_testing.paths import TINY
from millrace_testing.procs import gone, workers

MODEL = (f"model={TINY}", "limits={num_pages: 129, max_model_len: 4096, max_prefill_tokens: 128}")
ON_GPU = ("device=cuda", "dtype=bfloat16", "memory_fraction=0.2")
PACE = 40  # tokens, behind which the worker knows how long its steps take
START_S = 400.0  # on a GPU with empty caches


def cases() -> Iterator[ParameterSet]:
    """Settings of the worker, the rank that is lost, and how."""
    for ranks, *how in (("tp=2", 0, signal.SIGSTOP), ("dp=2", 1, signal.SIGSTOP), ("tp=2", 1, signal.SIGKILL)):
        yield pytest.param((ranks,), *how, marks=pytest.mark.long)
    on_gpus = (("tp=2", 1, signal.SIGSTOP), ("dp=2", 0, signal.SIGSTOP), ("dp=2", 1, signal.SIGKILL))
    for ranks, victim, how in (*on_gpus, ("dp=8", 5, signal.SIGKILL)):
        needed = int(ranks[3:])
        few = pytest.mark.skipif(torch.cuda.device_count() < needed, reason=f"needs {needed} CUDA devices")
        yield pytest.param((ranks, *ON_GPU), victim, how, marks=[pytest.mark.gpu, pytest.mark.timeout(600), few])


@pytest.mark.parametrize(("sets", "victim", "how"), cases())
async def test_lost_rank_is_named_and_leaves_nothing(
    sets: tuple[str, ...], victim: int, how: signal.Signals, tmp_path: Path
) -> None:
    started = workers(tmp_path, "unified", sets=(*MODEL, *sets), timeout_s=START_S)
    async with started as [worker], FakeLink(worker) as link:
        family, members = worker.family(), sorted(worker.ranks(), key=lambda rank: (rank.create_time(), rank.pid))
        running = request([*range(20, 40)], max_tokens=4000)
        link.submit(running)
        while len(link.tokens(running)) < PACE:
            await asyncio.sleep(0.02)
        members[victim].send_signal(how)
        failure = (await link.finish(running)).failure
        assert failure.reason == Reason.WORKER_LOST and f"rank {victim} " in failure.message, failure
        error = await link.end()
        assert error is not None and from_rpc_error(error).reason is Reason.WORKER_LOST
        assert await worker.process.wait() == 1
        await gone(family)
