"""A worker process that is started again finds its prefixes in the folder of the process before it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from millrace_common.page_hash import page_hashes
from millrace_testing.fake_router import FakeLink, request
from millrace_testing.procs import SIM, workers
from millrace_testing.sim import expected, prompt_of

LENGTH = 1000  # 15 full pages, and 40 tokens


async def test_prefixes_survive_a_restart(tmp_path: Path) -> None:
    folder, prompt = tmp_path / "kv", prompt_of(LENGTH)
    blocks = {block.hex() for block in page_hashes(prompt, 64)[:15]}
    tiers = ["limits.host_cache_gib=0.01", f"limits.disk_cache={folder}", "limits.disk_cache_gib=0.1"]
    for start, cached in (("first", 0), ("second", 15 * 64)):
        (tmp_path / start).mkdir()
        async with workers(tmp_path / start, "unified", sets=[*SIM, *tiers]) as (worker,):
            async with FakeLink(worker) as link:
                asked = request(prompt, max_tokens=3)
                link.submit(asked)
                await link.finish(asked)
                assert link.tokens(asked) == expected(prompt, 3)
                assert link.of(asked)[0].cached_tokens == cached
            async with asyncio.timeout(20):
                while not blocks <= {file.name for file in folder.rglob("*")}:
                    await asyncio.sleep(0.02)
            await worker.whole()
            assert await worker.metric("millrace_disk_pages_total", way="load") == cached / 64
