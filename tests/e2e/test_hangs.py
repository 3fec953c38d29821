"""Processes that live and do nothing: a stopped rank, a step without end, a stopped frontend. Streams leave them."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e.test_faults import finish, make_prompt, more_retries, retries
from millrace_cli.cluster import ClusterSpec, server_command
from millrace_testing.client import Answer, Client, collect, until
from millrace_testing.cluster import ControlledCluster
from millrace_testing.faulty_worker import HANG
from millrace_testing.paths import ROOT
from millrace_testing.procs import ranks_of

TOKENS = 400  # 4 s of steps
SILENT = "rank 0 hangs: no sign of its process for 2"


@pytest.mark.long
async def test_streams_leave_a_decode_worker_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "hanging"
    monkeypatch.setenv(HANG, str(hanging))
    folders = ("proto", "kernels", "services", "router", "bench", "tests")
    monkeypatch.setenv("PYTHONPATH", ":".join(str(ROOT / folder) for folder in folders))
    spec = ClusterSpec(
        decode=2,
        engine="sim",
        command=command,
        restart=True,
        log_dir=tmp_path / "logs",
        worker_set=("sim.step_s=0.01",),
    )
    async with (
        ControlledCluster(spec) as cluster,
        Client(cluster.grpc_address, cluster.admin_address) as client,
    ):

        def rank() -> int:
            (found,) = ranks_of(cluster.pid("decode-0"))
            return found.pid

        def never_ends(how: str = "") -> None:
            hanging.write_text(f"{rank()}{how}")

        await streams_survive(cluster, client, lambda: os.kill(rank(), signal.SIGSTOP))
        await until(lambda: SILENT in log_of(cluster), what="the reason")
        await cluster.wait_routable()
        await streams_survive(cluster, client, never_ends)
        await until(lambda: "rank 0 hangs: no step has ended for 2" in log_of(cluster), what="the reason")
        await cluster.wait_routable()
        silent = log_of(cluster).count(SILENT)
        await streams_survive(cluster, client, lambda: never_ends(" spin"))
        await until(lambda: log_of(cluster).count(SILENT) > silent, what="the reason")
        await cluster.wait_routable()
        frontend = cluster.pid("decode-0")
        await streams_survive(cluster, client, lambda: os.kill(frontend, signal.SIGSTOP))
        os.kill(frontend, signal.SIGCONT)
        await cluster.wait_routable()
        assert cluster.pid("decode-0") == frontend, "ranks that went on are not taken for hung ones"
        await client.wait_whole()


async def streams_survive(cluster: ControlledCluster, client: Client, strike: Callable[[], None]) -> None:
    """Streams on both decode workers see each token once, and those of the victim were tried again."""
    before, prompts = await retries(cluster), [make_prompt(seed, 50) for seed in range(6)]
    answers = [Answer() for _ in prompts]

    async def run(prompt: list[int], answer: Answer) -> Answer:
        async for chunk in client.stream(prompt, max_tokens=TOKENS):
            collect(answer, chunk)
        return answer

    tasks = [asyncio.create_task(run(p, a)) for p, a in zip(prompts, answers, strict=True)]
    await until(lambda: all(len(answer.tokens) >= 30 for answer in answers), what="30 tokens each")
    strike()
    for prompt, task in zip(prompts, tasks, strict=True):
        await finish(task, prompt, TOKENS)
    assert (await more_retries(cluster, before)).keys() == {"WORKER_LOST"}


def command(role: str) -> list[str]:
    return server_command(role) if role != "decode" else [sys.executable, "-m", "millrace_testing.faulty_worker", role]


def log_of(cluster: ControlledCluster) -> str:
    return (cluster.log_dir / "decode-0.log").read_text()
