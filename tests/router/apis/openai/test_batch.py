"""`millrace batch` of requests of all APIs, against a router."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path

from router.fake_worker import DECODE, PREFILL, FakeWorker
from router.harness import Cluster

HELLO = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/chat/completions": {"messages": HELLO, "max_tokens": 4},
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": HELLO, "max_tokens": 4},
}


async def millrace(*arguments: str | Path, key: str = "sk-some-secret-0123456789abcdefgh") -> tuple[int, str]:
    command = [sys.executable, "-m", "millrace_cli", *map(str, arguments)]
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stderr=pipe, env={"MILLRACE_API_KEY": key})
    _, told = await process.communicate()
    return process.returncode, told.decode()


async def test_a_batch_of_every_api_is_answered(cluster: Callable, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(json.dumps({"keys": [{"name": "one", "key": "sk-some-secret-0123456789abcdefgh"}]}))
    made: Cluster = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), api_keys=str(tmp_path / "keys"))
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    requests = [{"custom_id": url, "method": "POST", "url": url, "body": body} for url, body in BODIES.items()]
    file.write_text("".join(json.dumps(request) + "\n" for request in requests))
    code, told = await millrace("batch", file, "--out", out, "--address", f"{made.url}/v1", "--concurrency", 2)
    assert code == 0, told
    assert "4/4" in told and "4 answered" in told
    answers = {line["custom_id"]: line["response"] for line in map(json.loads, out.read_text().splitlines())}
    assert set(answers) == set(BODIES) and all(answer["status_code"] == 200 for answer in answers.values())
    assert all(answer["request_id"] in answer["body"]["id"] for answer in answers.values())
    assert made.metric("millrace_tenant_requests_total", tenant="one", status="ok") == 4
    await made.quiet()
    code, told = await millrace("batch", file, "--out", tmp_path / "x", "--address", made.url, key="sk-nobody")
    assert code == 1 and "refuses the API key" in told and told.count("\n") == 1
