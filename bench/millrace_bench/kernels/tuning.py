"""What all tuners share: compiling ahead, timing a configuration, and the record of a run.

Compiling takes longer than measuring, so processes compile the configurations ahead, one process per core, for a part
of the time. A configuration that is not compiled by then is left out, and so is a job that the time did not reach.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from millrace_bench.common import Record, print_record
from millrace_bench.kernels.numeric import rms_error
from millrace_bench.kernels.timing import CALLS_PER_GRAPH, Call, time_us

MOST_PROCESSES = 16
Row = dict[str, Any]
Job = TypeVar("Job")
Option = TypeVar("Option", bound=Hashable)


def parser(description: str, seconds: float) -> argparse.ArgumentParser:
    """The options of every tuner."""
    found = argparse.ArgumentParser(description=description)
    found.add_argument("--seconds", type=float, default=seconds, help="for everything; no further job begins after it")
    found.add_argument("--out", type=Path, help="a file for the JSON, rewritten after every job")
    return found


class Run:
    """One run of a tuner: its time, which begins now, and its record."""

    def __init__(self, bench: str, args: argparse.Namespace) -> None:
        self._start, self._args = time.monotonic(), args
        self._rows: list[Row] = []
        self._record = Record(bench, vars(args), {"rows": self._rows})  # its rows are still to come

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self._start + self._args.seconds

    def compile(self, tasks: Iterable[tuple[Hashable, Call]], part: float) -> set[Hashable]:
        """The keys whose tasks ended without an error within that part of the time; of equal keys the first task runs.

        The kernels come back through the compilers' caches on disk.
        """
        first: dict[Hashable, Call] = {}
        for key, task in tasks:
            first.setdefault(key, task)
        workers = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
        pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
        futures: dict[Future[None], Hashable] = {pool.submit(_compile, task): key for key, task in first.items()}
        until = self._start + part * self._args.seconds
        done, late = wait(futures, timeout=max(until - time.monotonic(), 1))
        pool.shutdown(wait=True, cancel_futures=True)
        print(f"# {len(done)} configurations compiled, {len(late)} too late", flush=True)
        for future in done:
            if error := future.exception():
                print_failure(futures[future], error)
        return {futures[future] for future in done if future.exception() is None}

    def measure(self, jobs: Iterable[Job], row: Callable[[Job], Row | None]) -> None:
        """`row` of each job that the time reaches, written as they come; a job that fails costs its row alone."""
        for job in jobs:
            if self.is_over:
                print(f"no time left for {job}", flush=True)
                continue
            try:
                found = row(job)
            except Exception as failure:
                print_failure(job, failure)
                continue
            if found:
                self._rows.append(found)
                if self._args.out:
                    self._args.out.write_text(self._record.to_json() + "\n")
        print_record(self._record)


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


def print_failure(what: object, failure: BaseException) -> None:
    print(f"{what}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)


def _compile(task: Call) -> None:
    task()
    torch.cuda.synchronize()
