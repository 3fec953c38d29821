"""Whose transport is broken: that of a worker whose pages others cannot read, or that of the one that reads. Pure."""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable, Set

WINDOW_S = 30.0  # older reports say nothing about today's connections
READERS = 2  # distinct ones: a single one may be broken itself
PAUSE_S = 60.0  # between two renewals of a rank's agent: while a fabric is down, new agents do not help
LIMIT = 8  # imports whose reads failed, without a good read between them


class Wedge:
    """The reports of readers about one rank's agents."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._reports: dict[str, float] = {}  # latest, by reader
        self._renewed_at = -PAUSE_S

    def reported(self, reader: str, checked: bool) -> bool:
        """Whether the agent is to be replaced now. `checked`: nothing is wrong with the reader, and it has no other
        source.
        """
        now = self._clock()
        self._reports = {name: at for name, at in self._reports.items() if now - at < WINDOW_S}
        self._reports[reader] = now
        if now - self._renewed_at < PAUSE_S or (len(self._reports) < READERS and not checked):
            return False
        self._reports.clear()
        self._renewed_at = now
        return True


class Verdict(enum.Enum):
    NOTHING = enum.auto()
    CHECK = enum.auto()  # there is one source only: ours or its transport is broken
    LEAVE = enum.auto()  # reads from every source fail


class Isolation:
    """The reads of one worker, by source. A dead source proves nothing: only living ones count."""

    def __init__(self) -> None:
        self._failed: collections.Counter[str] = collections.Counter()  # since the last good read, by source

    def succeeded(self) -> None:
        self._failed.clear()

    def failed(self, source: str, living: Set[str]) -> Verdict:
        self._failed[source] += 1
        return self.verdict(living)

    def verdict(self, living: Set[str]) -> Verdict:
        self._failed = collections.Counter({name: count for name, count in self._failed.items() if name in living})
        if self._failed.total() < LIMIT or len(self._failed) < len(living):
            return Verdict.NOTHING
        return Verdict.LEAVE if len(living) > 1 else Verdict.CHECK
