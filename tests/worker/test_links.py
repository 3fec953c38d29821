"""What a worker says of routers that cannot share its cached pages."""

from __future__ import annotations

from pathlib import Path

from millrace_testing.fake_router import FakeLink
from millrace_testing.procs import workers

WORDS = "have different secrets (secret): their prompts share no cached pages"


async def test_routers_with_different_cache_keys_are_named_in_the_log(tmp_path: Path) -> None:
    async with workers(tmp_path, "unified") as (worker,):
        for key in (b"one", b""):
            async with FakeLink(worker, router_id="a", cache_key_id=b"one"), FakeLink(worker, "", "b", key):
                assert WORDS not in worker.process.log_tail()
        async with FakeLink(worker, router_id="c", cache_key_id=b"one"), FakeLink(worker, "", "d", b"two"):
            assert f"routers d and c {WORDS}" in worker.process.log_tail()
