"""What the main thread of a rank is at, for the thread that tells the frontend (engine/health/heartbeat.py).

The main thread owes progress unless it waits: for messages, or for other ranks. A step may take a multiple of the
slowest recent one; a step with prompt chunks a multiple of what recent ones took per token. What takes longer for a
good reason is announced before it begins, with `busy`.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping

from millrace_common.pace import LEAST_S, Slowest

from millrace_serve.engine.step.batch import HostBatch

MARGIN = 5.0  # of a step with prompt chunks, over what it should take


class Progress:
    """Written by the main thread; other threads call `busy` and read.

    Attributes:
        marks: ever made; when it stays, the main thread has come no further
        waiting: for messages or for other ranks
        launched: steps; the ranks of a worker launch the same ones
        limit_s: that the next mark may take, while the thread does not wait
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.marks, self.waiting, self.launched, self.limit_s = 0, True, 0, LEAST_S
        self.tell: Callable[[], None] = lambda: None  # tells the frontend at once, and returns when that is done
        self.compiled: Callable[[], Mapping[str, int]] = dict  # kernels compiled since its start was over, by library
        self.clock = clock  # seconds that this process lived through; another one goes on where this one is
        self._marked_at = self._ended_at = clock()  # the latest step's end
        self._plain, self._per_token = Slowest(), Slowest()
        self._in_flight: deque[tuple[float | None, float]] = deque()  # `_tokens` of each step, and when it was launched
        self._busy: list[str] = []
        self._long_operation = False  # something was announced since the oldest step in flight began

    @property
    def doing(self) -> str:
        """What was announced and goes on; empty: nothing."""
        return next(iter(self._busy), "")

    @contextlib.contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """Announce what may take long. From any thread."""
        self._busy.append(what)
        self._long_operation = True
        self.tell()
        try:
            yield
        finally:
            self._busy.remove(what)
            self._long_operation = True
            self.tell()

    @contextlib.contextmanager
    def waits(self) -> Iterator[None]:
        """The main thread waits meanwhile: for messages, or for other ranks."""
        self._mark()
        self.waiting = True
        try:
            yield
        finally:
            self.waiting = False
            self._mark()

    def launches(self, batch: HostBatch) -> None:
        """A step; `finished` follows when its results are there."""
        self.launched += 1
        if not self._in_flight:
            self._long_operation = bool(self._busy)
        self._in_flight.append((_tokens(batch), self.clock()))
        self._expect()

    @property
    def started_at(self) -> float:
        """When the newest step in flight began: with its launch, or with the end of the one before it."""
        return max(self._in_flight[-1][1], self._ended_at)

    def finished(self, late: bool = False) -> float | None:
        """Seconds that the oldest step in flight took; None: something that was announced may be a part of them, or
        they are not known. `late`: it had ended before anybody waited for it, perhaps hours ago.
        """
        tokens, launched_at = self._in_flight.popleft()
        now, long_operation, self._long_operation = self.clock(), self._long_operation, bool(self._busy)
        began = self._marked_at if late else max(launched_at, self._ended_at)
        seconds, self._ended_at = now - began, now
        if tokens and not long_operation:
            self._per_token.add(seconds / tokens)
        elif tokens is not None and not long_operation:
            self._plain.add(seconds)
        self._expect()
        self._mark()
        return None if long_operation or late else seconds

    def _mark(self) -> None:
        self._marked_at = self.clock()
        self.marks += 1

    def _expect(self) -> None:
        limit_s = LEAST_S
        for tokens, _ in self._in_flight:
            limit_s = max(limit_s, MARGIN * tokens * self._per_token.value if tokens else self._plain.limit_s)
        self.limit_s = limit_s


def _tokens(batch: HostBatch) -> float | None:
    """The weight of a step with prompt chunks; 0 without chunks. None: only other replicas have chunks, and say how
    long the step may take.
    """
    if not batch.is_decode:
        return batch.weight
    return 0.0 if batch.all_decode else None
