"""What all tuners share: a job and what it found, compiling ahead, and timing configurations.

Compiling takes longer than measuring, so processes compile the configurations ahead, one process per core, for a part
of the time. A configuration that is not compiled by then is left out, and so is a job that the time did not reach.
"""

import multiprocessing
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from millrace_kernels.fp8 import BLOCK, Fp8
from millrace_kernels.testing.tolerances import rms_error
from millrace_load.record import Row
from torch import Tensor

from millrace_bench.kernels.timing import CALLS_PER_GRAPH, Call, time_us
from millrace_bench.kernels.tuned_file import Entry

COMPILE_PART = 0.55  # of the time, at most
GAIN = 0.97  # a row of a table is worth its line when it takes less than this part of the next best's time
Option = TypeVar("Option", bound=Hashable)


class Found(NamedTuple):
    """What a job measured: for the record, and for the tables of this GPU."""

    row: Row
    entries: tuple[Entry, ...] = ()


class Clock:
    """The time of a run, which begins now."""

    def __init__(self, seconds: float) -> None:
        self._start, self.seconds = time.monotonic(), seconds

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._start + self.seconds

    def left(self, part: float) -> float:
        return max(self._start + part * self.seconds - time.monotonic(), 1.0)


class Job(Protocol):
    """A kernel at a shape."""

    def tasks(self) -> Iterable[tuple[Hashable, Call]]:
        """What compiles each configuration, by a key; it travels to another process. Equal keys compile the same."""

    def measure(self, ready: set[Hashable], clock: Clock) -> Found | None:
        """Of the configurations whose keys are ready."""


def run(jobs: Sequence[Job], clock: Clock, processes: int, keep: Callable[[Found], None]) -> None:
    """Compiles, then measures all jobs that the time reaches; a job that fails costs its row alone."""
    ready = compile_ahead((task for job in jobs for task in job.tasks()), clock, processes)
    for job in jobs:
        if clock.is_over:
            print(f"no time left for {job}", flush=True)
            continue
        try:
            found = job.measure(ready, clock)
        except Exception as failure:
            print_failure(job, failure)
            continue
        if found:
            keep(found)


def compile_ahead(tasks: Iterable[tuple[Hashable, Call]], clock: Clock, processes: int) -> set[Hashable]:
    """The keys whose tasks ended without an error within their part of the time; of equal keys the first task runs.

    The kernels come back through the compilers' caches on disk.
    """
    first: dict[Hashable, Call] = {}
    for key, task in tasks:
        first.setdefault(key, task)
    if not first:
        return set()
    pool = ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn"))
    futures: dict[Future[None], Hashable] = {pool.submit(_compile, task): key for key, task in first.items()}
    done, late = wait(futures, timeout=clock.left(COMPILE_PART))
    pool.shutdown(wait=True, cancel_futures=True)
    print(f"# {len(done)} configurations compiled, {len(late)} too late", flush=True)
    for future in done:
        if error := future.exception():
            print_failure(futures[future], error)
    return {futures[future] for future in done if future.exception() is None}


def times_of(
    what: object,
    options: Iterable[Option],
    calls: Callable[[Option], Sequence[Call]],
    device: torch.device,
    *,
    wanted: Tensor | None = None,
    same: float = 0.0,
    result: Callable[[Option], Tensor] | None = None,
    is_over: Callable[[], bool] = lambda: False,
    samples: int = 3,
    calls_per_graph: int = CALLS_PER_GRAPH,
) -> dict[Option, float]:
    """Microseconds of each option, ascending. Options that fail or give a wrong result are printed and left out.

    Args:
        calls: the same work on inputs that take turns.
        wanted: what an option's `result`, by default that of its first call, is compared with.
        same: the largest rms error.
        is_over: whether no time is left for another option.
    """
    times: dict[Option, float] = {}
    for option in options:
        if is_over():
            break
        try:
            of_option = calls(option)
            if wanted is not None:
                found: Any = of_option[0]() if result is None else result(option)
                error = rms_error(found, wanted)
                assert error <= same, f"differs from the reference by {error:.1e}"
            times[option] = time_us(of_option, device, samples, calls_per_graph)
        except Exception as failure:  # too much shared memory, say
            print_failure(f"{what}: {option}", failure)
    return dict(sorted(times.items(), key=lambda item: item[1]))


def blank(device: torch.device, *shape: int) -> Fp8:
    """A weight of zeros [..., N, K], to compile for."""
    *stack, n, k = shape
    data = torch.zeros(shape, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn)
    return Fp8(data, torch.zeros(*stack, -(-n // BLOCK), -(-k // BLOCK), device=device))


def print_failure(what: object, failure: BaseException) -> None:
    print(f"{what}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)


def _compile(task: Call) -> None:
    task()
    torch.cuda.synchronize()
