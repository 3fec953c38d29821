"""Whether a decode worker goes on with the streams that it has begun, as far as this router sees."""

import asyncio
from collections.abc import Callable

from millrace.v1 import worker_pb2
from millrace_common.pace import TICK_S, PatientClock, Slowest
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_router.config import Timeouts


class WorkerProgress:
    """Pure. Times are of a PatientClock. Signs of progress are outputs, and load reports unlike the one before.
    Of the time in which the worker's ranks got no CPU, as it says itself, nothing counts.
    """

    def __init__(self, ceiling_s: float, now: float) -> None:
        """`ceiling_s`: of a silence, however slow the worker was lately."""
        self._ceiling_s = ceiling_s
        self._gaps = Slowest()
        self._looked_at = self._lived = self._moved_at = now  # the latter two without what the worker was starved
        self._starved = 0.0
        self._owes = False

    def moved(self, now: float) -> None:
        self._live(now)
        if self._owes:
            self._gaps.add(self._lived - self._moved_at)
        self._moved_at = self._lived

    def look(self, streams: bool, now: float, starved: float = 0.0) -> str:
        """To be called all the time. Returns why the worker is lost. `streams`: some that have begun have not ended;
        `starved`: part of the time in which the ranks get no CPU, below 1.
        """
        self._live(now)
        self._starved = starved
        if not self._owes or not streams:
            self._owes, self._moved_at = streams, self._lived
        limit_s = min(self._gaps.limit_s, self._ceiling_s)
        silence = self._lived - self._moved_at
        return f"no progress for {silence:.1f} s, and {limit_s:.1f} s are allowed" if silence > limit_s else ""

    def _live(self, now: float) -> None:
        self._lived, self._looked_at = self._lived + (now - self._looked_at) * (1 - self._starved), now


class WorkerWatch:
    """Of one worker, over all its sessions."""

    def __init__(self, timeouts: Timeouts) -> None:
        self._timeouts = timeouts
        self.load = worker_pb2.LoadSnapshot()  # its latest report; empty while it is not reachable
        self.stuck: worker_pb2.LoadSnapshot | None = None  # what it said when it made no progress, as long as it does
        self.resumed_at = 0.0  # when its last long operation ended; by the loop's clock
        self.moved: Callable[[], None] = lambda: None  # to be called with each of its outputs

    @property
    def silence_s(self) -> float:
        """That its next report may take."""
        return self._timeouts.silence / (1 - self._starved)

    @property
    def _starved(self) -> float:
        """Part of the time in which its ranks get no CPU, as it says itself; below 1, whatever it says."""
        return min(max(0.0, self.load.starved), 0.9)

    @property
    def _explained(self) -> bool:
        """It says itself why its streams stand still: a pause, or what a rank does that takes long."""
        return self.load.busy or self.load.state == worker_pb2.WORKER_STATE_PAUSED

    def due_since(self, now: float) -> float:
        """Since when progress is due there: during a long operation none is, and afterwards the time begins again."""
        return now if self._explained else self.resumed_at

    def reported(self, load: worker_pb2.LoadSnapshot) -> bool:
        """Returns whether it was stuck until now. A worker whose numbers change makes progress."""
        if self._explained:
            self.resumed_at = asyncio.get_running_loop().time()
        if self.load.replicas != load.replicas:
            self.moved()
        self.load, stuck = load, self.stuck
        if again := stuck is not None and (stuck.epoch, stuck.replicas) != (load.epoch, load.replicas):
            self.stuck = None
        return again

    async def progress(self, streams: Callable[[], bool]) -> None:
        """Raises MillraceError when the streams that it has begun stand still, whatever it says of itself."""
        clock = PatientClock()
        progress = WorkerProgress(self._timeouts.stall, clock.now())
        self.moved = lambda: progress.moved(clock.now())
        while not (why := progress.look(streams() and not self._explained, clock.tick(), self._starved)):
            await asyncio.sleep(TICK_S)
        self.stuck = self.load
        raise MillraceError(Reason.WORKER_LOST, why)
