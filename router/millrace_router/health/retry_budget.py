"""The number of allowed retries of all requests together. Pure; a clock is passed in.

    allowed = ratio x (requests alive in the window) + per_s x WINDOW_S

A request is alive in the window if it runs now or has ended in it.
"""

from millrace_router.config import RetryBudget
from millrace_router.window import Window

WINDOW_S = 10.0
ENDED, SPENT = 0, 1


class Budget:
    def __init__(self, rules: RetryBudget) -> None:
        self._rules = rules
        self._window = Window(WINDOW_S, 2)
        self._running = 0

    def begin(self) -> None:
        self._running += 1

    def end(self, now: float) -> None:
        self._running -= 1
        self._window.add(ENDED, 1, now)

    def left(self, now: float) -> float:
        """Retries that the budget allows now."""
        ended, spent = self._window.sums(now)
        return self._rules.ratio * (self._running + ended) + self._rules.per_s * WINDOW_S - spent

    def spend(self, now: float) -> bool:
        """Whether one more attempt may be made; if so, it is counted."""
        if self.left(now) < 1:
            return False
        self._window.add(SPENT, 1, now)
        return True
