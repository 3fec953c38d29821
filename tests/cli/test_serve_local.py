"""`millrace serve-local` as a process, over stand-in routers and workers."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from millrace_cli import serve_local
from millrace_cli.cluster import ClusterSpec, LocalCluster, StartError
from millrace_cli.errors import CommandError
from millrace_cli.process import Process
from millrace_cli.serve_local import processes_table, usable_port, with_playground
from millrace_common.config import load
from millrace_router.config import RouterConfig
from rich.console import Console

SCRIPT = """
import sys
from pathlib import Path
sys.path[:0] = {tests!r}
from conftest import standin_command
from millrace_cli import app as cli, serve_local
from millrace_cli.cluster import ClusterSpec
spec = ClusterSpec(command=standin_command, restart=True, log_dir=Path({logs!r}), {fields})
cli.app.command("run")(lambda: serve_local.serve_local(spec))
sys.argv[1:] = ["run"]
cli.main()
"""


class Running:
    """The supervisor with its output in a file."""

    def __init__(self, folder: Path, fields: str) -> None:
        script = SCRIPT.format(
            tests=[str(Path(__file__).parent), str(Path(__file__).parents[1])], logs=str(folder / "logs"), fields=fields
        )
        self.output_path = folder / "output"
        with self.output_path.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, "-c", script], stdout=out, stderr=subprocess.STDOUT)

    @property
    def output(self) -> str:
        return self.output_path.read_text()

    def wait_for(self, text: str) -> None:
        while text not in self.output:
            assert self.process.poll() is None, f"no {text!r} in:\n{self.output}"
            time.sleep(0.05)

    def children(self) -> dict[str, int]:
        """Role to pid."""
        commands = {child.pid: child.cmdline() for child in psutil.Process(self.process.pid).children()}
        return {command[2]: pid for pid, command in commands.items() if "standin" in " ".join(command)}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], Running]]:
    started = []

    def begin(fields: str = "") -> Running:
        started.append(Running(tmp_path, fields))
        return started[-1]

    yield begin
    for running in started:
        running.process.kill()
        running.process.wait()


SHOWN = ("prefill-0", "decode-0", "router", "ready", "millrace generate --address 127.0.0.1:", "curl -N http://")


def test_run_shows_addresses_replaces_a_child_and_stops_cleanly(start, wait_gone) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        free = server.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as server:
        taken = server.getsockname()[1]
        assert usable_port(taken) == 0
        running = start(f"ports={{'admin_http': {free}, 'grpc': {taken}}}")
        running.wait_for("Ctrl-C stops everything.")
    told = (f", http://127.0.0.1:{free}\n", f"page   http://127.0.0.1:{free}/\n", f"port {taken} is taken")
    assert [text for text in (*SHOWN, *told) if text not in running.output] == []
    before = running.children()
    os.kill(before["decode"], signal.SIGKILL)
    running.wait_for("decode-0 ended with code -9")
    while running.children().get("decode", before["decode"]) == before["decode"]:
        assert running.process.poll() is None
    pids = list(running.children().values())
    assert len(pids) == 3
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait() == 0
    assert "stopped" in running.output
    wait_gone(pids)


@pytest.mark.parametrize(
    ("ports", "own", "origins"),
    [
        ({"admin_http": 8001}, (), ("http://127.0.0.1:8001", "http://localhost:8001")),
        ({"admin_http": 8001}, ("connections.cors=[]",), ()),
        ({"admin_http": 0}, (), ()),
        ({}, (), ()),
    ],
)
def test_routers_page_alone_may_read_answers_in_a_browser(
    ports: dict[str, int], own: tuple[str, ...], origins: tuple[str, ...]
) -> None:
    spec = with_playground(ClusterSpec(ports=ports, router_set=own))
    assert load(RouterConfig, None, ["model=m", *spec.router_set]).connections.cors == origins


def test_second_signal_kills(start, wait_gone) -> None:
    running = start("worker_set=('deaf=true',), stop_grace_s=60")
    running.wait_for("Ctrl-C stops everything.")
    pids = list(running.children().values())
    running.process.send_signal(signal.SIGINT)
    running.wait_for("stopping")
    running.process.send_signal(signal.SIGINT)
    assert running.process.wait() == 0
    wait_gone(pids)


def test_signal_during_start_stops(start) -> None:
    running = start("worker_set=('never=true',)")
    while len(running.children()) < 3:
        time.sleep(0.05)
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait() == 0
    assert "is ready" not in running.output


def test_signal_while_a_failed_start_is_undone_kills_and_keeps_its_message(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, spec: ClusterSpec) -> None:
            self.processes, self.killed = {}, asyncio.Event()
            self.kill_all = self.killed.set

        async def start(self) -> None:
            raise StartError("a worker exited")

        async def stop(self) -> None:
            signal.raise_signal(signal.SIGINT)
            await self.killed.wait()

    monkeypatch.setattr(serve_local, "LocalCluster", Failing)
    with pytest.raises(CommandError, match="a worker exited") as caught:
        asyncio.run(serve_local.supervise(ClusterSpec(), Console(quiet=True)))
    assert caught.value.code == 1


def test_what_a_worker_says_of_its_start_is_no_markup(tmp_path: Path) -> None:
    cluster = LocalCluster(ClusterSpec(log_dir=tmp_path))
    cluster.processes = {"decode-0": Process("decode-0", tmp_path, {})}
    cluster.processes["decode-0"].note("loading", "reads [/models/x]")
    console = Console(width=200)
    with console.capture() as shown:
        console.print(processes_table(cluster))
    assert "reads [/models/x]" in shown.get()
