"""Work that pauses while rows travel, and the lane on which they travel.

Stages are a generator: it pauses where a transfer is under way, so that other work can be launched meanwhile. The value
that it returns at its end is the result. Run straight through, it is the same work without pauses.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

import torch

T = TypeVar("T")
Stages = Generator[None, None, T]


def straight(stages: Stages[T]) -> T:
    """Runs the stages without a break."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: T = end.value
            return result


@dataclass(frozen=True, slots=True)
class Lane:
    """How one part of a step sends its rows."""

    index: int = 0  # of the part: which buffers an exchange uses
    stream: torch.cuda.Stream | None = None  # beside the computation; None: transfers are steps of it

    def begin(self, transfer: Callable[[], T]) -> Callable[[], T]:
        """Launches the transfer behind all work so far. The function that it returns makes later work wait for it.

        That function keeps what `transfer` reads alive: nothing else may get that memory before the wait.
        """
        if self.stream is None:
            result = transfer()
            return lambda: result
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result, done = transfer(), self.stream.record_event()

        def wait(reads: object = transfer) -> T:
            torch.cuda.current_stream().wait_event(done)
            return result

        return wait


MAIN = Lane()
