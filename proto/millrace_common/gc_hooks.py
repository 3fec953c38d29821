"""Python's garbage collector in a process that must not pause: measure every pause, and freeze permanent objects.

A collection can start inside any allocation, also while a lock of logging or metrics is held. So the callback only
appends to a deque, and the process's loop takes the pauses out and reports them.
"""

import collections
import gc
import logging
import time

import msgspec

from millrace_common.metrics import Metrics

log = logging.getLogger(__name__)

WARN_S = 0.05  # a longer pause is logged


class GcPause(msgspec.Struct, frozen=True, array_like=True):
    generation: int
    seconds: float
    collected: int  # objects


class PauseWatch:
    """Measures from its construction until `close`; `process` names the process in the log."""

    def __init__(self, process: str) -> None:
        self._process = process
        self._started = 0.0
        self._pauses: collections.deque[GcPause] = collections.deque(maxlen=1024)
        gc.callbacks.append(self._on_gc)

    def take(self) -> list[GcPause]:
        """The pauses since the last call; long ones are logged."""
        pauses = [self._pauses.popleft() for _ in range(len(self._pauses))]
        for pause in pauses:
            if pause.seconds >= WARN_S:
                text = "gc pause of %.1f ms in %s: generation %d, %d objects collected, %d frozen"
                found = pause.generation, pause.collected, gc.get_freeze_count()
                log.warning(text, pause.seconds * 1e3, self._process, *found)
        return pauses

    def close(self) -> None:
        """Idempotent."""
        if self._on_gc in gc.callbacks:
            gc.callbacks.remove(self._on_gc)

    def _on_gc(self, phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            self._started = time.perf_counter()
            return
        self._pauses.append(GcPause(info["generation"], time.perf_counter() - self._started, info["collected"]))


class ProcessGc:
    """The garbage collector of a process that has the metrics of the catalogue's PROCESS rows."""

    def __init__(self, process: str, metrics: Metrics) -> None:
        self._process = process
        self._metrics = metrics
        self._watch = PauseWatch(process)
        self.freezes = 0
        self.frozen_objects = 0  # by the latest freeze

    def freeze(self) -> int:
        objects = freeze()
        self.freezes, self.frozen_objects = self.freezes + 1, objects
        self.count_freeze(self._process, 1, objects)
        self.report()
        return objects

    def report(self) -> None:
        self.observe(self._process, self._watch.take())

    def count_freeze(self, process: str, processes: int, objects: int) -> None:
        self._metrics.gc_freezes.labels(process=process).inc(processes)
        self._metrics.gc_frozen.labels(process=process).set(objects)

    def observe(self, process: str, pauses: list[GcPause]) -> None:
        for pause in pauses:
            self._metrics.gc_pause.labels(process=process, generation=str(pause.generation)).observe(pause.seconds)

    def close(self) -> None:
        self._watch.close()


def freeze() -> int:
    """Collect, then exclude all live objects from further collections. Returns the number of frozen objects."""
    gc.collect()
    gc.freeze()
    return gc.get_freeze_count()
