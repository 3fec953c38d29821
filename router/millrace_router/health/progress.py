"""Whether a decode worker goes on with the streams that it has begun, as far as this router sees. Pure."""

from millrace_common.pace import Slowest


class WorkerProgress:
    """Times are of a PatientClock. Signs of progress are outputs and load reports that differ from the one before.
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
        """To be called all the time. Returns why the worker is lost.

        Args:
            streams: some that have begun have not ended.
            starved: part of the time in which the ranks get no CPU; below 1.
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
