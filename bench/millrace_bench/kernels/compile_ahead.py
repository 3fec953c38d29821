"""Compiling takes longer than measuring: a tuner's configurations are compiled ahead by as many processes as there are
cores, for a limited time. What is not ready by then is left out.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Hashable, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, wait

import torch

MOST_PROCESSES = 16


def compile_ahead(tasks: Mapping[Hashable, Callable[[], object]], until: float) -> set[Hashable]:
    """The keys whose tasks ended before `until` (of time.monotonic) without an error. The kernels come back through the
    compilers' caches on disk.
    """
    workers = min(len(os.sched_getaffinity(0)), MOST_PROCESSES)
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn"))
    futures: dict[Future[None], Hashable] = {pool.submit(_compile, task): key for key, task in tasks.items()}
    done, late = wait(futures, timeout=max(until - time.monotonic(), 1))
    pool.shutdown(wait=True, cancel_futures=True)
    print(f"# {len(done)} configurations compiled, {len(late)} too late", flush=True)
    for future in done:
        if error := future.exception():
            print(f"{futures[future]}: {type(error).__name__}: {str(error)[:200]}", flush=True)
    return {futures[future] for future in done if future.exception() is None}


def _compile(task: Callable[[], object]) -> None:
    task()
    torch.cuda.synchronize()
