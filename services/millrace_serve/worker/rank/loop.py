"""The main loop of a rank: take messages until a step is due, launch it, wait for the one before it, send the events.
Without work it sleeps on the inbox, and on the calls of other replicas.
"""

import logging
import time
from collections.abc import Callable

from millrace_common import gc_hooks

from millrace_serve.engine.core import Events, Load
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.step.runner import Announce
from millrace_serve.worker.channels import Receiver
from millrace_serve.worker.messages import (
    FreezeGc,
    GcFrozen,
    GcPauses,
    Report,
    SetWeights,
    Stop,
    ToEngine,
    ToProcess,
    WeightsSet,
)
from millrace_serve.worker.rank.profiler import RankProfiler

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.02  # a load without other events is shipped at most this often while the engine works
QUIET_S = 1.0  # after this long without messages an idle engine checks the pool's invariants, which takes milliseconds


class Upkeep:
    """Garbage collection, profiles and weights of a rank's process: what the frontend asks of the process, not of the
    engine.
    """

    def __init__(
        self,
        rank: int,
        report: Callable[[Report], None],
        announce: Announce,
        set_weights: Callable[[SetWeights], WeightsSet],
    ) -> None:
        self._report = report
        self._announce = announce
        self._set_weights = set_weights
        self._pauses = gc_hooks.PauseWatch(f"rank{rank}")
        self._profiler = RankProfiler(rank)

    def handle(self, message: ToProcess) -> None:
        with self._announce(type(message).__name__):
            if isinstance(message, FreezeGc):
                objects = gc_hooks.freeze()
                self.report_pauses()
                log.info("froze %d objects of the garbage collector", objects)
                self._report(GcFrozen(objects))
            elif isinstance(message, SetWeights):
                self._report(self._set_weights(message))
            else:
                self._report(self._profiler.handle(message))

    def report_pauses(self) -> None:
        if pauses := self._pauses.take():
            self._report(GcPauses(pauses))


class EngineLoop:
    """The loop of a replica's leader."""

    def __init__(
        self, engine: Engine, inbox: Receiver[ToEngine], report: Callable[[Report], None], upkeep: Upkeep
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._report = report
        self._upkeep = upkeep
        self._checked = False
        self._active_at = 0.0
        self._shipped: Load | None = None
        self._shipped_at = 0.0

    def run(self) -> None:
        engine = self._engine
        self._ship(Events(load=engine.load()))
        while not engine.stopped:
            self._receive()
            while engine.launch_delay_s():
                engine.reserve()
                self._ship_early()
                self._receive()
            engine.launch()
            self._ship_early()
            engine.commit()
            self._ship(engine.events())
            self._upkeep.report_pauses()
        engine.close()

    def _receive(self) -> None:
        """Wait as long as the engine wants to, and hand it the messages."""
        engine, wait_s = self._engine, self._wait_s()
        with engine.progress.waits():
            messages = self._inbox.receive(wait_s, engine.wake_fds)
        for message in messages:
            if isinstance(message, Stop):
                engine.stop()
            elif isinstance(message, ToProcess):
                self._upkeep.handle(message)
            else:
                engine.submit(message)
        self._check_when_quiet(bool(messages) or engine.has_work())

    def _wait_s(self) -> float | None:
        wait_s = self._engine.wait_s()
        if self._checked:
            return wait_s
        return QUIET_S if wait_s is None else min(wait_s, QUIET_S)

    def _check_when_quiet(self, active: bool) -> None:
        """Once per pause."""
        now = time.monotonic()
        if active:
            self._active_at, self._checked = now, False
        elif not self._checked and now - self._active_at >= QUIET_S:
            self._engine.check_idle()
            self._checked = True

    def _ship_early(self) -> None:
        """What somebody waits for goes out before the step under way ends."""
        if self._engine.has_events:
            self._ship(self._engine.events())

    def _ship(self, events: Events) -> None:
        """Send events. Without events, an unchanged load, or a changed one while the engine is busy, is held back."""
        if not events:
            if events.load == self._shipped:
                return
            if self._engine.has_work() and time.monotonic() - self._shipped_at < LOAD_INTERVAL_S:
                return
        self._report(events)
        self._shipped, self._shipped_at = events.load, time.monotonic()


def follower_inbox(inbox: Receiver[ToEngine], upkeep: Upkeep) -> None:
    """The inbox of a rank without scheduler, until Stop. Its steps come from its leader, which also ends it."""
    while True:
        for message in inbox.receive(None):
            if isinstance(message, Stop):
                return
            if not isinstance(message, ToProcess):
                raise TypeError(f"a follower does not take {type(message).__name__}")
            upkeep.handle(message)
