"""The time of each phase of a start."""

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping

log = logging.getLogger(__name__)

NAMES = ("import", "load", "memory", "compile", "capture", "warm-up")  # in order; the last one is the frontend's


class Phases:
    def __init__(
        self, on_begin: Callable[[str], None] = lambda name: None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._on_begin = on_begin
        self._clock = clock
        self.seconds: dict[str, float] = {}

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        assert name in NAMES, name
        self._on_begin(name)
        started = self._clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._clock() - started
            log.debug("start-up phase %s: %.2f s so far", name, self.seconds[name])


def slowest(phases: list[Mapping[str, float]]) -> dict[str, float]:
    """The longest time of each phase over several ranks, which wait for each other, in order."""
    return {name: max(one.get(name, 0.0) for one in phases) for name in NAMES if any(name in one for one in phases)}


def table(seconds: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.1f} s" for name, value in seconds.items())
