"""The processes of one server, which a duel starts, kills, stops and restarts."""

import asyncio
import contextlib
import os
import re
import shlex
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from millrace_cli.cluster import StartError
from millrace_cli.process import Process

POLL_S = 0.1
GRACE_S = 40.0  # from SIGTERM to SIGKILL: longer than the drains of the servers
ROUTER = "router"


@dataclass(frozen=True, slots=True)
class Part:
    name: str
    role: str  # prefill, decode, unified or router
    command: Sequence[str]
    ready: str  # URL that answers 200 while it serves
    metrics: str = ""  # URL, where the part tells which KV is held
    env: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Layout:
    """A server: its parts, and what clients have to know. Its router, if any, starts when the others serve."""

    parts: Sequence[Part]
    url: str
    gpus: int
    held: str  # pattern of a line of metrics whose number is KV that requests hold: 0 when none runs
    apart: Callable[[int], tuple[dict[str, str], dict[str, Any]]]  # headers and fields: runs share no cached prefix


def shell(command: Sequence[str]) -> list[str]:
    """The command of a Process for one that is not ours: the shell takes the `--announce FILE` that Process adds."""
    return ["/bin/sh", "-c", f"exec {shlex.join(command)}", command[0]]


async def end(process: Process) -> None:
    """At once, with its own children."""
    process.kill_group()
    await process.stop(GRACE_S)


class Running:
    """The processes of a server, by the names of its parts."""

    def __init__(self, layout: Layout, folder: Path, limit_s: float) -> None:
        """`limit_s`: of a start until every part serves."""
        self.parts, self._held, self._limit_s = layout.parts, layout.held, limit_s
        folder.mkdir(parents=True, exist_ok=True)  # of logs
        environment = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // len(self.parts))), **os.environ}
        self.processes = {part.name: Process(part.name, folder, {**environment, **part.env}) for part in self.parts}
        self._http = httpx.AsyncClient(timeout=5.0)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        try:
            await self.begin()
            yield
        finally:
            await asyncio.gather(*map(self.kill, self.parts))
            await self._http.aclose()

    async def begin(self) -> None:
        """From nothing, also where a fault has left parts that do not come back. StartError: one ended or was late."""
        began = time.monotonic()
        await asyncio.gather(*map(self.kill, self.parts))
        for routers in (False, True):
            parts = [part for part in self.parts if (part.role == ROUTER) is routers]
            await asyncio.gather(*map(self.start, parts))
            if not await self.whole(parts):
                late = "\n".join(self.processes[part.name].end_of_log(20) for part in parts)
                raise StartError(f"not ready after {time.monotonic() - began:.0f} s.\n{late}")

    async def start(self, part: Part) -> None:
        await self.processes[part.name].start(shell(part.command))  # ports are fixed: a part comes back on its own

    async def kill(self, part: Part) -> None:
        await end(self.processes[part.name])

    async def whole(self, parts: Sequence[Part] | None = None, *, restart: bool = False) -> bool:
        """Wait until all of these parts serve. False: not within the limit, or one has ended. `restart`: it is started
        again, as a supervisor would.
        """
        parts = self.parts if parts is None else parts
        deadline = time.monotonic() + self._limit_s
        while not all([await self._serves(part) for part in parts]):
            ended = [part for part in parts if not self.processes[part.name].running]
            if (ended and not restart) or time.monotonic() > deadline:
                return False
            await asyncio.gather(*map(self.start, ended))
            await asyncio.sleep(POLL_S)
        return True

    async def _serves(self, part: Part) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await self._http.get(part.ready)).status_code == httpx.codes.OK
        return False

    async def held(self, limit_s: float) -> float | None:
        """KV that is still held after so long without a request; 0 as soon as there is none. None: no part tells."""
        urls = [part.metrics for part in self.parts if part.metrics]
        deadline = time.monotonic() + limit_s
        with contextlib.suppress(httpx.TransportError):
            while urls:
                text = "\n".join([(await self._http.get(url)).text for url in urls])
                found = sum(map(float, re.findall(self._held, text, re.MULTILINE)))
                if not found or time.monotonic() > deadline:
                    return found
                await asyncio.sleep(POLL_S)
        return None
