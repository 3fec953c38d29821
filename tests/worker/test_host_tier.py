"""A worker whose prompts are five times its pool: the second pass finds them in the host tier."""

import random

from millrace_serve.engine.core import SamplingParams
from millrace_serve.engine.sim.runner import SimSettings
from millrace_testing.fake_router import FakeLink, request
from millrace_testing.inside import inside
from millrace_testing.oracle import oracle_outputs
from millrace_testing.procs import SIM

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
                    await link.finish(one)
                    assert link.of(one)[0].cached_tokens == cached
                    assert link.tokens(one) == oracle_outputs(prompt, GREEDY, SimSettings())
        [load] = (await worker.whole()).replicas
        assert load.host_pages_total > load.host_pages_used >= 4 * (PAGES - 1)
        cached, from_host = (load.counters[name] for name in ("cached_tokens", "host_cached_tokens"))
        assert cached == COUNT * (LENGTH - 1) and from_host > 0.9 * cached
        for way in ("load", "store"):
            count = load.counters[f"host_bytes/{way}"]
            assert await worker.metric("millrace_host_bytes_total", way=way) == count > 0
        assert await worker.metric("millrace_engine_total", what="host_cached_tokens") == from_host
