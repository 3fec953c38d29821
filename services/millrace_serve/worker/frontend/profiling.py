"""torch.profiler on the ranks of a worker: started and stopped through the frontend, one trace file per rank.

1. `start` starts the profiler of every rank (worker/rank/profiler.py); a running profile is left alone. A caller that
   goes away while the ranks answer changes nothing.
2. `stop`, or the end of its time, has every rank write a Chrome trace, which stops that rank's engine for as
   long as the writing takes. The paths are kept until the next profile.
"""

import asyncio
import contextlib
import logging
from pathlib import Path

from millrace_common.reasons import Reason
from millrace_rpc.errors import FieldError, MillraceError

from millrace_serve.worker.config import EngineKind, WorkerConfig
from millrace_serve.worker.frontend.ranks import Ranks
from millrace_serve.worker.messages import StartProfile, StopProfile

log = logging.getLogger(__name__)

DEFAULT_S, LONGEST_S = 30.0, 600.0


class Profiling:
    """One profile at a time."""

    def __init__(self, config: WorkerConfig, epoch: str, ranks: Ranks) -> None:
        self._config = config
        self._epoch = epoch
        self._ranks = ranks
        self._one_by_one = asyncio.Lock()
        self._count = 0
        self._expiry: asyncio.Task[None] | None = None  # while a profile runs
        self._paths: list[str] = []  # of the latest profile

    async def start(self, max_seconds: float | None) -> Path:
        """Start, and return the folder of the traces. Raises MillraceError when this worker cannot profile."""
        seconds = DEFAULT_S if max_seconds is None else max_seconds
        if not 0 < seconds <= LONGEST_S:
            raise FieldError("max_seconds", f"is {seconds}; it must be over 0 and at most {LONGEST_S:.0f}")
        if self._config.engine is EngineKind.SIM:
            raise MillraceError(Reason.INVALID_ARGUMENT, "a simulated engine has nothing to profile (engine=sim)")
        if (folder := self._config.profile_dir) is None:
            raise MillraceError(Reason.INVALID_ARGUMENT, "profile_dir: no folder for traces is configured")
        await asyncio.shield(asyncio.create_task(self._start(folder, seconds)))  # otherwise ranks would never stop
        return folder

    async def stop(self) -> list[str]:
        """Stop, and return the traces of the running profile, else of the latest. NOT_FOUND without any."""
        await self.end()
        if not self._paths:
            raise MillraceError(Reason.NOT_FOUND, "no profile was started, or the latest could not be written")
        return self._paths

    async def end(self) -> None:
        """Have the running profile written, if there is one. Raises MillraceError when that fails."""
        await asyncio.shield(asyncio.create_task(self._stop()))

    def close(self) -> None:
        if self._expiry is not None:
            self._expiry.cancel()

    async def _start(self, folder: Path, seconds: float) -> None:
        async with self._one_by_one:
            if self._expiry is None:
                self._count += 1
                label = f"{self._config.role}-{self._epoch[:8]}-{self._count}"
                try:
                    await self._tell(StartProfile(str(folder), label))
                except MillraceError:
                    with contextlib.suppress(MillraceError):
                        await self._tell(StopProfile())  # of the ranks that have begun: nobody would end theirs
                    raise
                self._paths = []
                self._expiry = asyncio.create_task(self._expire(seconds))

    async def _stop(self) -> None:
        async with self._one_by_one:
            if self._expiry is not None:
                self._expiry.cancel()
                await self._write()

    async def _expire(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        async with self._one_by_one:
            try:
                await self._write()
            except MillraceError as error:
                log.error("%s", error.message)

    async def _write(self) -> None:
        self._expiry = None
        self._paths = await self._tell(StopProfile())

    async def _tell(self, message: StartProfile | StopProfile) -> list[str]:
        """Send to all ranks and return their paths. Raises when a rank failed, after all have answered."""
        answers = await self._ranks.profile(message)
        if errors := [answer.error for answer in answers if answer.error]:
            raise MillraceError(Reason.INTERNAL, f"the profiler failed: {'; '.join(errors)}")
        return [answer.path for answer in answers]
