"""What `peers/router.py` compares: smg in front of an HTTP worker, our router in front of a prefill and a decode
worker, and gRPC's library alone, each with one core for the router where there are two.
"""

import asyncio
import contextlib
import functools
import os
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx

from millrace_bench.peers.clients import Target, first_tokens
from millrace_bench.peers.sse_worker import MODEL
from millrace_bench.router_load import Work, direct
from millrace_bench.router_system import Settings, cores_for, cpu_seconds_of, start, stop, system

PROMPT_TOKENS = 512  # of a request that goes to our prefill worker directly
START_S = 60.0


@dataclass(frozen=True, slots=True)
class Side:
    """A router with its workers. `direct` measures first tokens without the router, in a process of the pool."""

    target: Target
    pid: int
    direct: Callable[[int], list[float]]

    def cpu_s(self) -> float:
        return sum(map(cpu_seconds_of, _family(self.pid)))

    def rss_mb(self) -> float:
        pages = (int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in _family(self.pid))
        return sum(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


@contextlib.asynccontextmanager
async def sides(smg: Path, step_ms: float) -> AsyncIterator[dict[str, Side]]:
    cores = sorted(os.sched_getaffinity(0))
    async with contextlib.AsyncExitStack() as stack:
        ours = await stack.enter_async_context(system(Settings(step_ms=step_ms), 1))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-bench-")))
        command = [sys.executable, "-m", "millrace_bench.peers.sse_worker", "--step-ms", str(step_ms)]
        _, ports = await start(stack, command, folder / "worker.json")
        worker = Target("http", f"127.0.0.1:{ports['http']}", MODEL)
        with cores_for(cores[:1] if ours.pinned else cores):
            pid, address = await _start_smg(stack, smg, worker.address)
            command = [sys.executable, "-m", "millrace_bench.peers.grpc_alone", "--step-ms", str(step_ms)]
            bare, ports = await start(stack, command, folder / "grpc.json")
        alone = Target("grpc", f"127.0.0.1:{ports['grpc']}", "")
        straight = functools.partial(direct, ours.prefill, Work("grpc", "", PROMPT_TOKENS))
        router = ours.pids["router"][0]
        yield {
            "smg": Side(Target("http", address, MODEL), pid, functools.partial(first_tokens, worker)),
            "millrace http": Side(Target("http", ours.http[0], MODEL), router, straight),
            "millrace grpc": Side(Target("grpc", ours.grpc[0], MODEL), router, straight),
            "grpc alone": Side(alone, bare, functools.partial(first_tokens, alone)),
        }


async def _start_smg(stack: contextlib.AsyncExitStack, smg: Path, worker: str) -> tuple[int, str]:
    """Its process and its address. It is told its ports, because it announces none."""
    port, metrics = free_ports(2)
    command = [str(smg), "launch", "--worker-urls", f"http://{worker}", "--policy", "round_robin"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--log-level", "error"]
    command += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(metrics)]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    stack.push_async_callback(stop, process)
    address = f"127.0.0.1:{port}"
    async with asyncio.timeout(START_S), httpx.AsyncClient() as client:
        while not await _answers(client, address):
            if process.returncode is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            await asyncio.sleep(0.1)
    return process.pid, address


async def _answers(client: httpx.AsyncClient, address: str) -> bool:
    """Whether it has found its worker."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "stream": True}
    with contextlib.suppress(httpx.TransportError):
        return (await client.post(f"http://{address}/v1/chat/completions", json=body)).status_code == 200
    return False


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def _family(pid: int) -> list[int]:
    """The process and its descendants."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [pid, *(one for child in children for one in _family(child))]
