"""A worker whose prompts are five times its pool: the second pass finds them in the host tier. Also over two
ranks of a model, one of which is killed while it loads.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
from millrace_common.reasons import Reason
from millrace_serve.engine.core import SamplingParams
from millrace_serve.engine.sim.runner import SimSettings
from millrace_testing.fake_router import FakeLink, request
from millrace_testing.inside import inside
from millrace_testing.oracle import oracle_outputs
from millrace_testing.paths import TINY
from millrace_testing.procs import SIM, gone, workers

GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
PAGES, LENGTH, COUNT = 33, 257, 40  # 4 full pages a prompt: 160 pages of 64 tokens for a pool of 32


async def test_prompts_of_a_second_pass_come_from_the_host_tier() -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(1000, 9000) for _ in range(LENGTH)] for _ in range(COUNT)]
    limits = [f"limits.num_pages={PAGES}", "limits.max_running=4", "limits.host_cache_gib=0.01"]
    async with inside("unified", sets=[*SIM, *limits]) as [worker]:
        async with FakeLink(worker) as link:
            for cached in (0, LENGTH - 1):
                wanted = [request(prompt, max_tokens=3) for prompt in prompts]
                for one in wanted:
                    link.submit(one)
                for one, prompt in zip(wanted, prompts, strict=True):
                    await link.finish(one, 60)
                    assert link.of(one)[0].cached_tokens == cached
                    assert link.tokens(one) == oracle_outputs(prompt, GREEDY, SimSettings())
        [load] = (await worker.whole()).replicas
        assert load.host_pages_total > load.host_pages_used >= 4 * (PAGES - 1)
        assert (
            load.counters["cached_tokens"] == COUNT * (LENGTH - 1)
            and load.counters["host_cached_tokens"] > 0.9 * load.counters["cached_tokens"]
        )
        for way in ("load", "store"):
            count = load.counters[f"host_bytes/{way}"]
            assert await worker.metric("millrace_host_bytes_total", way=way) == count > 0
        assert (
            await worker.metric("millrace_engine_total", what="host_cached_tokens")
            == load.counters["host_cached_tokens"]
        )


@pytest.mark.long
async def test_rank_that_is_killed_during_loads_ends_the_worker(tmp_path: Path) -> None:
    """What was said until then is right, and the rest is said to be lost."""
    prompts = [[10 + (7 * i + 31 * room) % 500 for i in range(LENGTH)] for room in range(COUNT)]
    limits = f"limits={{num_pages: {PAGES}, max_model_len: 512, max_running: 4, host_cache_gib: 0.2, checks: [canary]}}"
    async with (
        workers(tmp_path, "unified", sets=[f"model={TINY}", "tp=2", limits], timeout_s=400.0) as (worker,),
        FakeLink(worker) as link,
    ):
        family, members = worker.family(), sorted(worker.ranks(), key=lambda rank: (rank.create_time(), rank.pid))
        first, again = ([request(prompt, max_tokens=3) for prompt in prompts] for _ in range(2))
        for one in first:
            link.submit(one)
        for one in first:
            await link.finish(one)
        for one in again:
            link.submit(one)
        assert (await link.first(again[4])).cached_tokens == LENGTH - 1
        members[1].send_signal(signal.SIGKILL)
        lost = 0
        for one, before in zip(again, first, strict=True):
            failure = (await link.finish(one)).failure
            assert failure.reason in ("", Reason.WORKER_LOST), failure
            lost += failure.reason == Reason.WORKER_LOST
            assert link.tokens(one) == link.tokens(before)[: len(link.tokens(one))]
        assert lost > 0
        assert await worker.process.wait() == 1
        await gone(family)
