"""`millrace serve-local`: a whole system on this machine until Ctrl-C.

1. Look for the checkpoint, and for free ports where the wished ones are taken.
2. Start the cluster under a live table of its processes.
3. Print the addresses and one line to try for each.
4. Wait for SIGINT or SIGTERM; children that die meanwhile come back.
5. Stop everything; a second signal kills instead of waiting.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.logging import RichHandler
from rich.table import Table

from millrace_cli.cluster import HOST, ROUTER_PORTS, ClusterSpec, LocalCluster, StartError
from millrace_cli.errors import CommandError

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
    changes: dict[str, Any] = {}
    for field in (f"{name}_port" for name in ROUTER_PORTS):
        wish = getattr(spec, field)
        if usable_port(wish) != wish:
            console.print(f"port {wish} is taken; {field.replace('_', ' ')} will be a free one", style="yellow")
            changes[field] = 0
    return replace(spec, **changes)


def processes_table(cluster: LocalCluster) -> Table:
    table = Table("process", "state", "time", "", box=None, pad_edge=False)
    for seen in cluster.status():
        style = STYLES.get(seen.state, "yellow")
        table.add_row(seen.name, f"[{style}]{seen.state}[/]", f"{seen.seconds:.1f} s", seen.detail)
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
    cluster, stopping = LocalCluster(spec), asyncio.Event()

    def on_signal() -> None:
        if stopping.is_set():
            cluster.kill_all()
        stopping.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    stopped = asyncio.create_task(stopping.wait())
    try:
        await start(cluster, stopped, console)
        await stopped
    finally:
        console.print("stopping (again: at once)", style="dim")
        await cluster.stop()
        console.print("stopped", style="dim")


async def start(cluster: LocalCluster, stopped: asyncio.Task[bool], console: Console) -> None:
    """Start the cluster under the live table and print its addresses, unless a signal comes first."""
    begin = time.monotonic()
    starting = asyncio.create_task(cluster.start())
    with Live(console=console, get_renderable=lambda: processes_table(cluster), refresh_per_second=8):
        await asyncio.wait({starting, stopped}, return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.wait({starting})
        return
    try:
        starting.result()
    except StartError as error:
        raise CommandError(str(error)) from error
    console.print(addresses(cluster, time.monotonic() - begin), markup=False, highlight=False, soft_wrap=True)


def serve_local(spec: ClusterSpec) -> None:
    """Returns after a clean stop; CommandError when the start failed."""
    if not (spec.model / "config.json").exists():
        raise CommandError(f"{spec.model}: there is no config.json; --model names a checkpoint folder", code=2)
    console = Console(stderr=False)
    logging.basicConfig(
        level=logging.INFO, format="%(message)s", handlers=[RichHandler(console=console, show_path=False)]
    )
    asyncio.run(supervise(resolve_ports(spec, console), console))
