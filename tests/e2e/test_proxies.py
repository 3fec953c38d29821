"""A company's proxy in the environment: a system starts and answers, and so do the commands that ask it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from millrace_cli import proxies
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_testing.client import Client
from millrace_testing.sim import expected, prompt_of

pytestmark = [pytest.mark.long]  # tests/cli/test_proxies.py asks clients alone

PROMPT = prompt_of(300)
LINE = {"custom_id": "1", "method": "POST", "url": "/v1/completions"}


def command(*arguments: str) -> str:
    """What `millrace` prints, in this environment."""
    run = [sys.executable, "-m", "millrace_cli", *arguments]
    return subprocess.run(run, capture_output=True, text=True, check=True).stdout


async def test_processes_and_commands_need_no_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in proxies.VARIABLES:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with LocalCluster(ClusterSpec(engine="sim", log_dir=tmp_path / "logs")) as cluster:
        async with Client(cluster.grpc_address) as client:
            assert (await client.generate(PROMPT, max_tokens=5, ignore_eos=True)).tokens == expected(PROMPT, 5)
        assert "routable" in command("workers", "--address", cluster.admin_address)
        asked, answered = tmp_path / "asked.jsonl", tmp_path / "answered.jsonl"
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        asked.write_text(json.dumps({**LINE, "body": body}))
        command("batch", str(asked), "--out", str(answered), "--address", cluster.http_url)
        assert json.loads(answered.read_text())["response"]["status_code"] == 200
    assert "no_proxy" not in os.environ
