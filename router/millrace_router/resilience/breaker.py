"""A circuit breaker for one worker's process. Pure; the clock is the caller's.

    CLOSED      requests go there. `consecutive` failures in a row, or `ratio` of at least `least` outcomes in the
                window, open it.
    OPEN        nothing is sent. What comes in of what was sent before changes nothing. After the pause:
    HALF_OPEN   one request at a time is sent: the next when the last one has succeeded, or after `probe` seconds.
                `probes` successes close it, any failure opens it again, for twice as long.

A success is a worker's first output for a request; a failure is whatever the flow blames on this worker alone.
"""

from __future__ import annotations

import enum

from millrace_router.resilience.config import BreakerRules
from millrace_router.resilience.window import Window

OUTCOMES, FAILURES = 0, 1


class State(enum.StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


LEGAL: dict[State, frozenset[State]] = {
    State.CLOSED: frozenset({State.OPEN}),
    State.OPEN: frozenset({State.HALF_OPEN}),
    State.HALF_OPEN: frozenset({State.CLOSED, State.OPEN}),
}


class Breaker:
    def __init__(self, rules: BreakerRules) -> None:
        self.state = State.CLOSED
        self._rules = rules
        self._window = Window(rules.window, 2)
        self._row = 0  # failures since the last success
        self._pause = rules.pause  # of the next opening
        self._until = 0.0  # OPEN: of the pause. HALF_OPEN: of the probe that is out
        self._succeeded = 0  # probes

    def why_not(self, now: float) -> str:
        """Why nothing is to be sent there now; empty when it may be."""
        if self.state is State.OPEN and now >= self._until:
            self._move(State.HALF_OPEN)
            self._succeeded, self._until = 0, now
        if self.state is State.OPEN:
            return "circuit open"
        return "circuit half open, a probe is out" if self.state is State.HALF_OPEN and now < self._until else ""

    def sent(self, now: float) -> None:
        if self.state is State.HALF_OPEN:
            self._until = now + self._rules.probe

    def succeeded(self, now: float) -> None:
        if self.state is State.CLOSED:
            self._row = 0
            self._window.add(OUTCOMES, 1, now)
        elif self.state is State.HALF_OPEN:
            self._succeeded, self._until = self._succeeded + 1, now
            if self._succeeded >= self._rules.probes:
                self._move(State.CLOSED)
                self._row, self._pause = 0, self._rules.pause
                self._window.clear()

    def failed(self, now: float) -> None:
        if self.state is State.CLOSED:
            self._row += 1
            self._window.add(OUTCOMES, 1, now)
            self._window.add(FAILURES, 1, now)
            outcomes, failures = self._window.sums(now)
            rules = self._rules
            if self._row >= rules.consecutive or (outcomes >= rules.least and failures >= rules.ratio * outcomes):
                self._open(now)
        elif self.state is State.HALF_OPEN:
            self._open(now)

    def _open(self, now: float) -> None:
        self._move(State.OPEN)
        self._until = now + self._pause
        self._pause = min(2 * self._pause, self._rules.longest_pause)

    def _move(self, state: State) -> None:
        assert state in LEGAL[self.state], f"{self.state} -> {state}"
        self.state = state
