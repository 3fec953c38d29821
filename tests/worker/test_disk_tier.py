"""A rank that is started again finds its prefixes in the folder of the rank before it, if that had the same secret."""

from pathlib import Path

import pytest
from engine.harness import request, said
from millrace_common.page_hash import page_hashes
from millrace_serve.engine.start.phases import Phases
from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.rank import process
from millrace_serve.worker.rank.parts import Parts, RankSpec
from millrace_testing.sim import expected, prompt_of

LENGTH = 1000  # 15 full pages, and 40 tokens


def configured(folder: Path) -> Parts:
    """The parts of a rank before its disk tier is added. The file of the secret is gone since the rank began."""
    limits = {"host_cache_gib": 0.01, "disk_cache": folder, "disk_cache_gib": 0.1}
    config = WorkerConfig(engine="sim", role="unified", limits=limits, secret=folder.with_name("gone"))
    return process._build(RankSpec(config, 0, "", "", ""), Phases())


def test_prefixes_survive_a_restart(tmp_path: Path) -> None:
    folder, prompt = tmp_path / "kv", prompt_of(LENGTH)
    blocks = {block.hex() for block in page_hashes(prompt, 64)[:15]}
    for secret, loaded, refused in ((b"a", 0, 0), (b"a", 15, 0), (b"b", 0, 15)):
        parts = configured(folder)
        process._open_store(parts, 32 * secret)
        engine = parts.engine
        assert engine is not None
        answer = said(engine, [request(1, prompt, max_tokens=3)], close=False)
        assert [token for token, _ in answer[1]] == expected(prompt, 3)
        while not blocks <= {file.name for file in folder.rglob("*")}:
            engine.step()
        counters = engine.load().counters
        assert counters["cached_tokens"] == 64 * counters.get("disk_pages/load", 0) == 64 * loaded
        assert counters.get("disk_pages/refuse", 0) == refused
        engine.close()


def test_disk_cache_that_is_a_file_refuses_the_start(tmp_path: Path) -> None:
    (tmp_path / "kv").write_text("")
    parts = configured(tmp_path / "kv")
    with pytest.raises(process.StartRefused, match=r"limits.disk_cache: .*kv cannot be used: Not a directory"):
        process._open_store(parts, b"")
