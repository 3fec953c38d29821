"""The life of a worker: its states in their order, and their listeners."""

import enum
import logging
import time
from collections.abc import Callable
from itertools import pairwise

from millrace_common.transitions import Transitions

log = logging.getLogger(__name__)


class State(enum.StrEnum):
    STARTING = "starting"  # the frontend answers GetInfo; ranks are being started
    LOADING = "loading"  # ranks read weights
    COMPILING = "compiling"  # ranks compile and capture
    WARMING = "warming"  # real tiny requests run through the engine
    READY = "ready"  # routers' requests are admitted; the health service reports SERVING
    PAUSED = "paused"  # no step runs; `message` says what goes on (weights.py)
    DRAINING = "draining"  # running work ends, nothing new is admitted
    STOPPED = "stopped"  # the process is about to exit; `message` has the reason


_ORDER = list(State)
MOVES = Transitions(
    {state: (follower, State.STOPPED) for state, follower in pairwise(State)}
    | {
        State.READY: (State.PAUSED, State.DRAINING, State.STOPPED),
        State.PAUSED: (State.READY, State.DRAINING, State.STOPPED),
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
