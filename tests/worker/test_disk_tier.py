"""A worker process that is started again finds its prefixes in the folder of the process before it, if that had the
same secret.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from millrace_common.page_hash import page_hashes
from millrace_serve.engine.start.phases import Phases
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.rank import process
from millrace_serve.worker.rank.parts import RankSpec
from millrace_testing.fake_router import FakeLink, request
from millrace_testing.procs import SIM, workers
from millrace_testing.sim import expected, prompt_of

LENGTH = 1000  # 15 full pages, and 40 tokens


async def test_prefixes_survive_a_restart(tmp_path: Path) -> None:
    folder, prompt = tmp_path / "kv", prompt_of(LENGTH)
    blocks = {block.hex() for block in page_hashes(prompt, 64)[:15]}
    tiers = ["limits.host_cache_gib=0.01", f"limits.disk_cache={folder}", "limits.disk_cache_gib=0.1"]
    for start, secret, cached in (("first", "a", 0), ("second", "a", 15 * 64), ("third", "b", 0)):
        (tmp_path / start).mkdir()
        (tmp_path / "secret").write_text(secret * 32)
        sets = [*SIM, *tiers, f"secret={tmp_path}/secret"]
        async with workers(tmp_path / start, "unified", sets=sets) as (worker,):
            async with FakeLink(worker) as link:
                asked = request(prompt, max_tokens=3)
                link.submit(asked)
                await link.finish(asked)
                assert link.tokens(asked) == expected(prompt, 3)
                assert link.of(asked)[0].cached_tokens == cached
            async with asyncio.timeout(120):
                while not blocks <= {file.name for file in folder.rglob("*")}:
                    await asyncio.sleep(0.02)
            await worker.whole()
            assert await worker.metric("millrace_disk_pages_total", way="load") == cached / 64
            assert await worker.metric("millrace_disk_pages_total", way="refuse") == 15 * (start == "third")


def test_disk_cache_that_is_a_file_refuses_the_start(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    limits = {"host_cache_gib": 0.01, "disk_cache": tmp_path / "kv"}
    config = WorkerConfig.model_validate({"engine": "sim", "role": "unified", "limits": limits})
    parts = process._build(RankSpec(config, 0, "", "", ""), Phases())
    with pytest.raises(process.StartRefused, match="kv cannot be used: Not a directory"):
        process._add_disk_tier(parts, config)
