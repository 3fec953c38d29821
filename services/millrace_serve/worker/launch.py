"""Starts rank processes and reports the end of one, behind the interface `Launcher`; ray_launch.py is the other
implementation.

No rank outlives the frontend, however the frontend ends: the kernel kills a rank with its parent (Linux), and a thread
of the rank waits for the parent's end.
"""

import asyncio
import multiprocessing
import shutil
import tempfile
from multiprocessing.process import BaseProcess

from millrace_serve.worker.config import WorkerConfig
from millrace_serve.worker.launcher import Launcher, OnExit
from millrace_serve.worker.rank.parts import RankSpec
from millrace_serve.worker.rank.process import main as rank_main


class LocalLauncher(Launcher):
    """Processes of this host, over Unix sockets in a private folder."""

    def __init__(self) -> None:
        self._folder = ""
        self._processes: list[BaseProcess] = []
        self._ends: list[asyncio.Future[None]] = []

    def bind(self) -> str:
        self._folder = tempfile.mkdtemp(prefix="millrace-")
        return f"ipc://{self._folder}/frontend"

    async def start(self, config: WorkerConfig, frontend: str, group: str, on_exit: OnExit) -> None:
        spawn = multiprocessing.get_context("spawn")
        loop = asyncio.get_running_loop()
        for rank in range(config.num_ranks):
            bind, rendezvous = f"ipc://{self._folder}/rank{rank}-{{name}}", f"file://{self._folder}/rendezvous"
            spec = RankSpec(config, rank, frontend, bind, rendezvous, group)
            process = spawn.Process(target=rank_main, args=(spec,), name=f"millrace-rank{rank}", daemon=True)
            process.start()
            self._processes.append(process)
            end: asyncio.Future[None] = loop.create_future()
            self._ends.append(end)
            loop.add_reader(process.sentinel, _ended, rank, process, end, on_exit)

    def pid(self, rank: int) -> int | None:
        return self._processes[rank].pid

    async def stop(self, grace_s: float) -> None:
        processes, ends = self._processes, self._ends  # another call may end meanwhile: a SIGTERM during a sleep
        if ends:
            await asyncio.wait(ends, timeout=grace_s)
            for process in processes:
                process.kill()
            await asyncio.wait(ends)
        self._processes, self._ends = [], []
        shutil.rmtree(self._folder, ignore_errors=True)


def _ended(rank: int, process: BaseProcess, end: asyncio.Future[None], on_exit: OnExit) -> None:
    asyncio.get_running_loop().remove_reader(process.sentinel)
    process.join()
    end.set_result(None)
    code = process.exitcode or 0
    on_exit(rank, f"signal {-code}" if code < 0 else f"exit code {code}")


def make_launcher(kind: str) -> Launcher:
    if kind == "ray":
        from millrace_serve.worker.ray_launch import RayLauncher  # Ray is installed on clusters only

        return RayLauncher()
    return LocalLauncher()
