"""Processes that live and do nothing: a stopped rank, a step without end, a stopped frontend. Streams leave them."""

import os
import signal
import sys
from pathlib import Path

import pytest
from e2e.test_faults import SLOW_DECODE, streams_that_survive
from millrace_cli.cluster import ClusterSpec, server_command
from millrace_testing.client import Client, until
from millrace_testing.cluster import ControlledCluster
from millrace_testing.faulty_worker import HANG
from millrace_testing.procs import PYTHONPATH, ranks_of

SILENT = "rank 0 hangs: no sign of its process for 2"


@pytest.mark.long
async def test_streams_leave_a_decode_worker_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "hanging"
    monkeypatch.setenv(HANG, str(hanging))
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)
    spec = ClusterSpec(
        decode=2,
        engine="sim",
        command=command,
        restart=True,
        log_dir=tmp_path / "logs",
        worker_set=SLOW_DECODE,
    )
    async with ControlledCluster(spec) as cluster, Client(cluster.grpc_address, cluster.admin_address) as client:

        def rank() -> int:
            (found,) = ranks_of(cluster.pid("decode-0"))
            return found.pid

        def never_ends(how: str = "") -> None:
            hanging.write_text(f"{rank()}{how}")

        async with streams_that_survive(cluster, client):
            os.kill(rank(), signal.SIGSTOP)
        await until(lambda: SILENT in log_of(cluster), what="the reason")
        await cluster.wait_routable()
        async with streams_that_survive(cluster, client):
            never_ends()
        await until(lambda: "rank 0 hangs: no step has ended for 2" in log_of(cluster), what="the reason")
        await cluster.wait_routable()
        silent = log_of(cluster).count(SILENT)
        async with streams_that_survive(cluster, client):
            never_ends(" spin")
        await until(lambda: log_of(cluster).count(SILENT) > silent, what="the reason")
        await cluster.wait_routable()
        frontend = cluster.pid("decode-0")
        async with streams_that_survive(cluster, client):
            os.kill(frontend, signal.SIGSTOP)
        os.kill(frontend, signal.SIGCONT)
        await cluster.wait_routable()
        assert cluster.pid("decode-0") == frontend, "ranks that went on are not taken for hung ones"
        await client.wait_whole()


def command(role: str) -> list[str]:
    return server_command(role) if role != "decode" else [sys.executable, "-m", "millrace_testing.faulty_worker", role]


def log_of(cluster: ControlledCluster) -> str:
    return (cluster.log_dir / "decode-0.log").read_text()
