"""What `bench router` starts: workers that cost nothing, or almost, and router processes in front of them. Each router
has a core to itself, and all others share what is left, if anything is.
"""

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import httpx
from millrace_cli.cluster import TINY, server_command

PAGE_SIZE = 64


@dataclass(frozen=True, slots=True)
class Settings:
    model: Annotated[Path, "folder with the tokenizer's files"] = TINY
    workers: Annotated[Literal["fake", "sim"], "workers of the router"] = "fake"
    api: Annotated[Literal["grpc", "http"], "protocol of the clients"] = "grpc"
    routers: Annotated[tuple[int, ...], "router processes, one run for each number"] = (1, 2)
    streams: Annotated[int, "streams of each router at full load"] = 256
    tokens: Annotated[int, "tokens per stream"] = 400
    step_ms: Annotated[float, "step time of the decode worker: one token per stream"] = 10.0
    requests: Annotated[int, "base number of requests of the smaller measurements"] = 400
    prompt_tokens: Annotated[int, "prompt tokens of a request"] = 512
    stream_interval_ms: Annotated[float, "the router's stream_interval"] = 0.0
    tls: Annotated[Path | None, "folder with tls.crt, tls.key and ca.crt: TLS everywhere, mutual inside"] = None


@dataclass(frozen=True, slots=True)
class System:
    """Addresses by API, one for each router, and the processes by role."""

    grpc: list[str]
    http: list[str]
    prefill: str
    pids: dict[str, list[int]]  # role to processes
    pinned: bool  # each router has its core

    def targets(self, api: str) -> list[str]:
        return self.grpc if api == "grpc" else self.http

    def cpu_seconds(self) -> dict[str, float]:
        """User and system time so far, by role. Clients are this process's pools."""
        clients = [process.pid for process in multiprocessing.active_children() if process.pid is not None]
        return {role: sum(map(cpu_seconds_of, pids)) for role, pids in {**self.pids, "clients": clients}.items()}


@contextlib.asynccontextmanager
async def system(s: Settings, routers: int) -> AsyncIterator[System]:
    async with contextlib.AsyncExitStack() as stack:
        cores = sorted(os.sched_getaffinity(0))
        pinned = routers < len(cores)
        own, others = (cores[:routers], cores[routers:]) if pinned else ([], cores)
        stack.enter_context(cores_for(others))  # the clients too, which start later
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-bench-")))
        workers = [await start(stack, _worker(role, s), folder / f"{role}.json") for role in ("prefill", "decode")]
        addresses = [f"127.0.0.1:{ports['grpc']}" for _, ports in workers]
        command = [*server_command("router"), "--set", f"model={s.model}", "--set", "log_level=WARNING"]
        command += ["--set", f"workers={json.dumps(addresses)}"]
        command += ["--set", f"stream_interval={s.stream_interval_ms / 1e3}"]
        if s.tls is not None:
            command += [*mutual(s.tls), "--set", f"public_tls={{cert: {s.tls}/tls.crt, key: {s.tls}/tls.key}}"]
        started = []
        for i in range(routers):
            with cores_for(own[i : i + 1] or others):
                started.append(await start(stack, command, folder / f"router-{i}.json"))
        for _, ports in started:
            await _ready(f"{'https' if s.tls else 'http'}://127.0.0.1:{ports['http']}/ready", client_context(s.tls))
        yield System(
            [f"127.0.0.1:{ports['grpc']}" for _, ports in started],
            [f"127.0.0.1:{ports['http']}" for _, ports in started],
            addresses[0],
            {"router": [pid for pid, _ in started], "prefill": [workers[0][0]], "decode": [workers[1][0]]},
            pinned,
        )


@contextlib.contextmanager
def cores_for(cores: Sequence[int]) -> Iterator[None]:
    """Processes that are started meanwhile run on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def mutual(folder: Path) -> list[str]:
    """The options of a server that talks to those with a certificate only."""
    files = {"cert": "tls.crt", "key": "tls.key", "ca": "ca.crt"}
    items = [f"tls.{key}={folder}/{name}" for key, name in files.items()]
    return [word for item in (*items, "tls.require_client_cert=true") for word in ("--set", item)]


def client_context(folder: Path | None) -> ssl.SSLContext | None:
    """Of a client of the APIs, which shows no certificate. None: plain."""
    return None if folder is None else ssl.create_default_context(cafile=folder / "ca.crt")


def _worker(role: str, s: Settings) -> list[str]:
    """The command of a worker that holds all streams at once."""
    if s.workers == "fake":
        own = ["--tls", str(s.tls)] if s.tls is not None else []
        return [sys.executable, "-m", "millrace_bench.fake_worker", role, "--step-ms", str(s.step_ms), *own]
    sequences, length = s.streams * max(s.routers) + 8, s.prompt_tokens + 2 * s.tokens  # half load runs twice as long
    values = {
        "engine": "sim",
        "log_level": "WARNING",
        "sim.step_s": s.step_ms / 1000 if role == "decode" else 0.0,
        "limits.max_model_len": length,
        "limits.max_running": sequences,
        "limits.num_pages": sequences * (length // PAGE_SIZE + 2),
    }
    items = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
    return [*server_command(role), *items, *(mutual(s.tls) if s.tls is not None else ())]


async def start(stack: contextlib.AsyncExitStack, command: Sequence[str], announce: Path) -> tuple[int, dict[str, int]]:
    process = await asyncio.create_subprocess_exec(*command, "--announce", str(announce))
    stack.push_async_callback(stop, process)
    async with asyncio.timeout(60):
        while not os.path.exists(announce):  # noqa: ASYNC240
            if process.returncode is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            await asyncio.sleep(0.05)
    return process.pid, json.loads(announce.read_text())  # noqa: ASYNC240


async def stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _ready(url: str, context: ssl.SSLContext | None) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient(verify=context or True) as client:
        while (await client.get(url)).status_code != 200:
            await asyncio.sleep(0.05)


def cpu_seconds_of(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
