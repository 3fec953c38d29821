"""An event loop whose clock jumps to the next timer: what waits for seconds takes none."""

import asyncio
import functools
from collections.abc import Callable, Coroutine
from typing import Any


class JumpingLoop(asyncio.SelectorEventLoop):
    """For coroutines that wait for each other and for timers, and for nothing outside of the loop."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self._now = max(self._now, self._scheduled[0].when())
        super()._run_once()


def run(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Decorates a test, which becomes a plain one."""

    @functools.wraps(test)
    def plain(*args: Any, **fixtures: Any) -> None:
        with asyncio.Runner(loop_factory=JumpingLoop) as runner:
            runner.run(test(*args, **fixtures))

    return plain
