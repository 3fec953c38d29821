"""A thread that tells the frontend that this process runs, and how far its main thread has come. When that takes too
long, the log gets the stacks of all threads: soon afterwards the frontend ends the process.

Time in which a thread of this process could not go on, or this thread came late, is no part of that: the main thread
waits for others, such as the one that launches kernels. Of a pause of the process nearly nothing counts as a step's.
"""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

from millrace_common.pace import TICK_S, PatientClock, Starvation

from millrace_serve.engine.health.progress import Progress
from millrace_serve.engine.health.rank_watch import HEARTBEAT_S, RankHeartbeat

STACKS_AFTER = 0.75  # of the time that the main thread may take

log = logging.getLogger(__name__)


class HeartbeatThread:
    """`with HeartbeatThread(progress, send):`; one thread at a time calls `send`, also those that announce."""

    def __init__(
        self,
        progress: Progress,
        send: Callable[[RankHeartbeat], None],
        write_stacks: Callable[[], None] = faulthandler.dump_traceback,
    ) -> None:
        self._progress, self._send, self._write_stacks = progress, send, write_stacks
        self._accounts, self._starved = Starvation(os.getpid()), 0.0
        self._clock = PatientClock(progress.clock)
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def __enter__(self) -> None:
        self._progress.clock, self._progress.tell = self._clock.now, self._tell
        self._tell()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._progress.tell = lambda: None
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        now, marks, silence, written, before = self._progress, -1, 0.0, False, time.monotonic()
        while not self._ended.wait(TICK_S):
            self._clock.tick()
            if (passed := time.monotonic() - before) < HEARTBEAT_S:
                continue
            self._starved, before = max(self._accounts.look(), 1 - HEARTBEAT_S / passed), before + passed
            self._tell()
            silence += passed * (1 - self._starved)
            if now.waiting or now.doing or now.marks != marks:
                marks, silence, written = now.marks, 0.0, False
            elif not written and silence > STACKS_AFTER * now.limit_s:
                log.warning("no step has ended for %.1f s; the stacks of all threads follow", silence)
                self._write_stacks()
                written = True

    def _tell(self) -> None:
        now = self._progress
        with self._lock:
            facts = now.marks, now.waiting, now.launched, now.limit_s, now.doing, dict(now.compiled())
            self._send(RankHeartbeat(*facts, self._starved))
