"""Whether a decode worker goes on with the streams that it has begun, as far as this router sees. Pure."""

from __future__ import annotations

from millrace_common.pace import Slowest


class Progress:
    """Times are of a PatientClock. Signs of progress are outputs and load reports that differ from the one before."""

    def __init__(self, ceiling_s: float, now: float) -> None:
        """`ceiling_s`: of a silence, however slow the worker was lately."""
        self._ceiling_s = ceiling_s
        self._gaps = Slowest()
        self._moved_at = now
        self._owes = False

    def moved(self, now: float) -> None:
        if self._owes:
            self._gaps.add(now - self._moved_at)
        self._moved_at = now

    def look(self, streams: bool, now: float) -> str:
        """To be called all the time. `streams`: some that have begun have not ended. Returns why the worker is lost."""
        if not self._owes or not streams:
            self._owes, self._moved_at = streams, now
        limit_s = min(self._gaps.limit_s, self._ceiling_s)
        silence = now - self._moved_at
        return f"no progress for {silence:.1f} s, and {limit_s:.1f} s are allowed" if silence > limit_s else ""
