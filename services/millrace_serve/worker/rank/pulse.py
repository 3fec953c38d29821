"""A thread that tells the frontend that this process runs, and how far its main thread has come."""

from __future__ import annotations

import threading
from collections.abc import Callable

from millrace_serve.engine.step.progress import Progress
from millrace_serve.worker.messages import PULSE_S, Pulse


class PulseThread:
    """`with PulseThread(progress, send):`; `send` is called by one thread at a time, also by those that announce."""

    def __init__(self, progress: Progress, send: Callable[[Pulse], None]) -> None:
        self._progress, self._send = progress, send
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
        while not self._ended.wait(PULSE_S):
            self._tell()

    def _tell(self) -> None:
        now = self._progress
        with self._lock:
            self._send(Pulse(now.marks, now.waiting, now.launched, now.limit_s, now.doing, dict(now.compiled())))
