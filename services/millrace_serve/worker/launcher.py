"""The interface for starting ranks. launch.py and ray_launch.py implement it."""

import abc
from collections.abc import Callable

from millrace_serve.worker.config import WorkerConfig

OnExit = Callable[[int, str], None]  # rank, how it ended


class Launcher(abc.ABC):
    @abc.abstractmethod
    def bind(self) -> str:
        """The endpoint of the frontend's inbox: ZeroMQ, perhaps with a wildcard port. Before each `start`."""

    @abc.abstractmethod
    async def start(self, config: WorkerConfig, frontend: str, group: str, on_exit: OnExit) -> None:
        """Start all ranks. `on_exit` is called on the event loop when one ends, for whatever reason. `frontend` and
        `group` as in RankSpec.
        """

    def pid(self, rank: int) -> int | None:
        """Of a rank that was started; None: it is not on this host, or nobody knows."""
        return None

    @abc.abstractmethod
    async def stop(self, grace_s: float) -> None:
        """Wait for the ranks, which have got Stop, and kill those that run after `grace_s`. Idempotent; `start`
        may follow.
        """
