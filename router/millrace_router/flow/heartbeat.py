"""Something to do whenever a time has passed without anything else."""

import asyncio
from collections.abc import Callable


class Heartbeat:
    """Calls `beat` whenever `sent_at` was not set to `now()` for `every_s` seconds. `clock`: an event loop."""

    def __init__(self, every_s: float, clock: asyncio.AbstractEventLoop) -> None:
        self.sent_at = clock.time()
        self.now = clock.time
        self._every_s = every_s
        self._clock = clock
        self._timer: asyncio.TimerHandle | None = None

    def start(self, beat: Callable[[], None]) -> None:
        def look() -> None:
            if self.now() >= self.sent_at + self._every_s:
                self.sent_at = self.now()
                beat()
            self._timer = self._clock.call_at(self.sent_at + self._every_s, look)

        look()

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
