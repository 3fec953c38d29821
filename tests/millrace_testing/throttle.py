"""Processes that get a fifth of the time: stopped for 80 ms and let go for 20 ms, as by a container's CPU quota."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator, Sequence

STOPPED_S, RUNNING_S = 0.08, 0.02


@contextlib.contextmanager
def throttled(pids: Sequence[int]) -> Iterator[None]:
    ended = threading.Event()

    def send(number: signal.Signals) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def run() -> None:
        while not ended.is_set():
            send(signal.SIGSTOP)
            ended.wait(STOPPED_S)
            send(signal.SIGCONT)
            ended.wait(RUNNING_S)

    thread = threading.Thread(target=run, name="throttle")
    if pids:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if pids:
            thread.join()
