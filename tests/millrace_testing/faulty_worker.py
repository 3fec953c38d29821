"""A worker that a test can make misbehave: `python -m millrace_testing.faulty_worker ROLE ARGUMENTS…`.

- While the file that MILLRACE_TEST_KV_FAULT names exists, reads of other workers' KV pages fail: three of four, and all
  if the file is not empty.
- A simulated step of the rank whose pid stands in the file that MILLRACE_TEST_HANG names never ends: it sleeps or,
  where "spin" follows the pid, computes in C and keeps the interpreter's lock.
- SIGUSR1 makes the frontend's garbage collector pause for some 100 ms.

Rank processes import the main module of their parent, and so this file replaces the sink and the step there.
"""

import ctypes
import gc
import itertools
import os
import re
import runpy
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from millrace_serve.engine.schedule.plan import StepOutput
from millrace_serve.transfer.base import KvSink, MemoryHandle, PageBuffer, ReadOp

from millrace_testing.faulty_transfer import Fault, FaultPlan, FaultySink

FLAG, HANG = "MILLRACE_TEST_KV_FAULT", "MILLRACE_TEST_HANG"
OBJECTS = 2_000_000  # that a collection has to look at


def break_transport() -> None:
    from millrace_serve.transfer import nixl

    working = nixl.NixlSink

    class Sink(KvSink):
        """Through the working sink, or through the failing one around it."""

        def __init__(self, pool: PageBuffer) -> None:
            self._working = working(pool)
            self._failing = FaultySink(self._working, pool, FaultPlan(rates={Fault.FAIL: 1.0}))
            self._flag = Path(os.environ[FLAG])
            self._reads = itertools.count()

        def connect(self, source: MemoryHandle) -> None:
            self._working.connect(source)

        def read(self, source: MemoryHandle, src_pages: Sequence[int], dst_pages: Sequence[int]) -> ReadOp:
            fails = self._flag.exists() and (next(self._reads) % 4 < 3 or self._flag.stat().st_size > 0)
            return (self._failing if fails else self._working).read(source, src_pages, dst_pages)

        def disconnect(self, agent: str) -> None:
            self._failing.disconnect(agent)

        def close(self) -> None:
            self._failing.close()

    nixl.NixlSink = Sink  # type: ignore[misc]


def break_steps(hanging: Path) -> None:
    from millrace_serve.engine.sim.runner import SimHandle

    result, me = SimHandle.result, str(os.getpid())

    def stuck(handle: SimHandle) -> StepOutput:
        while hanging.exists() and (how := hanging.read_text().split())[:1] == [me]:
            if how[1:]:
                re.match("(a|a)*$", 60 * "a" + "b")
            ctypes.CDLL(None).pause()
        return result(handle)

    SimHandle.result = stuck  # type: ignore[method-assign]


def pause(*_: object) -> None:
    gc.disable()
    hoard: list[list[object]] = [[] for _ in range(OBJECTS)]
    gc.enable()
    gc.collect()
    hoard.clear()


if __name__ == "__mp_main__":
    if FLAG in os.environ:
        break_transport()
    if HANG in os.environ:
        break_steps(Path(os.environ[HANG]))
elif __name__ == "__main__":
    from millrace_cli.cluster import SERVERS

    module, *sys.argv[1:2] = SERVERS[sys.argv[1]]
    signal.signal(signal.SIGUSR1, pause)
    runpy.run_module(f"{module}.__main__", run_name="__main__")
