"""A thread that tells the frontend that this process runs, and how far its main thread has come. When that takes too
long, the log gets the stacks of all threads: soon afterwards the frontend ends the process.
"""

from __future__ import annotations

import faulthandler
import logging
import threading
import time
from collections.abc import Callable

from millrace_serve.engine.step.progress import Progress
from millrace_serve.worker.messages import PULSE_S, Pulse

STACKS_AFTER = 0.75  # of the time that the main thread may take

log = logging.getLogger(__name__)


class PulseThread:
    """`with PulseThread(progress, send):`; `send` is called by one thread at a time, also by those that announce."""

    def __init__(
        self,
        progress: Progress,
        send: Callable[[Pulse], None],
        write_stacks: Callable[[], None] = faulthandler.dump_traceback,
    ) -> None:
        self._progress, self._send, self._write_stacks = progress, send, write_stacks
        self._lock, self._ended = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="pulse", daemon=True)

    def __enter__(self) -> None:
        self._progress.tell = self._tell
        self._tell()
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._progress.tell = lambda: None
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        now, marks, moved_at, written = self._progress, -1, time.monotonic(), False
        while not self._ended.wait(PULSE_S):
            self._tell()
            silence = time.monotonic() - moved_at
            if now.waiting or now.doing or now.marks != marks:
                marks, moved_at, written = now.marks, time.monotonic(), False
            elif not written and silence > STACKS_AFTER * now.limit_s:
                log.warning("no step has ended for %.1f s; the stacks of all threads follow", silence)
                self._write_stacks()
                written = True

    def _tell(self) -> None:
        now = self._progress
        with self._lock:
            self._send(Pulse(now.marks, now.waiting, now.launched, now.limit_s, now.doing, dict(now.compiled())))
