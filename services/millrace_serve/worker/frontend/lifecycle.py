"""The life of a worker: its states, their legal order, and their listeners.

1. STARTING   the frontend answers GetInfo; ranks are being started
2. LOADING    ranks read weights
3. COMPILING  ranks compile and capture
4. WARMING    real tiny requests run through the engine
5. READY      routers' requests are admitted; the health service reports SERVING
6. DRAINING   running work ends, nothing new is admitted
7. STOPPED    the process is about to exit; `message` has the reason
"""

from __future__ import annotations

import enum
import logging
import time
from collections.abc import Callable

from millrace_common.transitions import Transitions

log = logging.getLogger(__name__)


class State(enum.StrEnum):
    STARTING = "starting"
    LOADING = "loading"
    COMPILING = "compiling"
    WARMING = "warming"
    READY = "ready"
    DRAINING = "draining"
    STOPPED = "stopped"


_ORDER = list(State)
MOVES = Transitions(
    {
        State.STARTING: (State.LOADING, State.STOPPED),
        State.LOADING: (State.COMPILING, State.STOPPED),
        State.COMPILING: (State.WARMING, State.STOPPED),
        State.WARMING: (State.READY, State.STOPPED),
        State.READY: (State.DRAINING, State.STOPPED),
        State.DRAINING: (State.STOPPED,),
        State.STOPPED: (),
    }
)


class Lifecycle:
    def __init__(self, on_change: Callable[[State], None]) -> None:
        self.state = State.STARTING
        self.message = ""
        self._on_change = on_change
        self._since = time.monotonic()

    def to(self, state: State, message: str = "") -> None:
        MOVES.move(self.state, state, "worker")
        now = time.monotonic()
        log.info("%s -> %s after %.2f s%s", self.state, state, now - self._since, f": {message}" if message else "")
        self.state, self.message, self._since = state, message, now
        self._on_change(state)

    def advance(self, state: State, message: str) -> None:
        """Advance to `state` through the states in between; an earlier state changes only the message."""
        while _ORDER.index(self.state) < _ORDER.index(state):
            self.to(_ORDER[_ORDER.index(self.state) + 1], message)
        self.message = message
