"""`millrace serve-local`: a whole system on this machine until Ctrl-C; a second one kills instead of waiting."""

import asyncio
import itertools
import json
import logging
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

from millrace_common.config import ConfigError, load
from millrace_router.config import RouterConfig
from millrace_serve.worker.config import WorkerConfig
from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.markup import escape
from rich.table import Table

from millrace_cli.cluster import HOST, LOG_DIR, ClusterSpec, LocalCluster, StartError
from millrace_cli.errors import CommandError, told

STYLES = {"ready": "green", "exited": "bold red"}


def usable_port(port: int) -> int:
    """The port itself when it is free, else 0 (any)."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return 0
    return port


def resolve_ports(spec: ClusterSpec, console: Console) -> ClusterSpec:
    ports = {name: usable_port(wish) for name, wish in spec.ports.items()}
    for name, wish in spec.ports.items():
        if ports[name] != wish:
            console.print(f"port {wish} is taken; {name.replace('_', ' ')} port will be a free one", style="yellow")
    return replace(spec, ports=ports)


def with_playground(spec: ClusterSpec) -> ClusterSpec:
    """Let the router's page, and no other, read the answers of its HTTP API in a browser. `router_set` may say more."""
    port = spec.ports.get("admin_http", 0)
    if not port:
        return spec  # any free one, which is not known yet
    origins = [f"http://{host}:{port}" for host in (HOST, "localhost")]
    return replace(spec, router_set=(f"connections.cors={json.dumps(origins)}", *spec.router_set))


def processes_table(cluster: LocalCluster) -> Table:
    table = Table("process", "state", "time", "", box=None, pad_edge=False)
    for process in cluster.processes.values():
        style = STYLES.get(process.state, "yellow")
        table.add_row(process.name, f"[{style}]{process.state}[/]", f"{process.seconds:.1f} s", escape(process.detail))
    return table


def addresses(cluster: LocalCluster, seconds: float) -> str:
    """The addresses and commands that are printed for the user."""
    command = "millrace" if shutil.which("millrace") else os.path.relpath(Path(sys.executable).with_name("millrace"))
    return "\n".join(
        [
            "",
            f"Millrace is ready after {seconds:.1f} s.",
            f"  gRPC   {cluster.grpc_address}",
            f"  HTTP   {cluster.http_url}/v1",
            f"  admin  {cluster.admin_address}, {cluster.admin_http_url}",
            f"  page   {cluster.admin_http_url}/",
            f"  logs   {cluster.log_dir}",
            "",
            "Try it:",
            f'  {command} generate --address {cluster.grpc_address} "What is 123 + 456?"',
            f"  curl -N {cluster.http_url}/v1/chat/completions -H 'Content-Type: application/json' \\",
            """    -d '{"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 32, "stream": true}'""",
            f"  {command} workers --address {cluster.admin_address}",
            "",
            "Ctrl-C stops everything.",
        ]
    )


async def supervise(spec: ClusterSpec, console: Console) -> None:
    """Run the cluster until a signal; CommandError when the start failed."""
    with told(OSError, of=LOG_DIR):
        cluster, task, signals = LocalCluster(spec), asyncio.current_task(), itertools.count()
    assert task is not None

    def on_signal() -> None:
        if next(signals):
            cluster.kill_all()
        else:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    begin = time.monotonic()
    try:
        live = Live(console=console, get_renderable=lambda: processes_table(cluster), refresh_per_second=8)
        with live, told(StartError, code=1), told(OSError, of="--log-dir"):  # of the folder that cannot be used
            await cluster.start()
        console.print(addresses(cluster, time.monotonic() - begin), markup=False, highlight=False, soft_wrap=True)
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        pass  # the first signal
    finally:
        next(signals)  # from now on a signal kills
        console.print("stopping (again: at once)", style="dim")
        await cluster.stop()
        console.print("stopped", style="dim")


def check(spec: ClusterSpec) -> None:
    """Raises CommandError for settings that a process would refuse, as it would say. Starts none."""
    if not os.path.isfile(spec.model / "config.json"):  # False also where a path cannot be asked for
        raise CommandError(f"{spec.model}: there is no config.json; --model names a checkpoint folder", code=2)
    for name, role in spec.workers().items():
        with told(ConfigError, of="--worker-set"):
            load(WorkerConfig, None, [f"role={role}", *spec.worker_items(name)])
    with told(ConfigError, of="--router-set"):
        load(RouterConfig, None, [f"model={spec.model}", *spec.router_set])


def serve_local(spec: ClusterSpec) -> None:
    """Returns after a clean stop; CommandError when the start failed."""
    console = Console(stderr=False)
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    asyncio.run(supervise(with_playground(resolve_ports(spec, console)), console))
