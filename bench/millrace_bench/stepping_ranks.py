"""Ranks for the bench of stepping: processes that run one step again and again, or threads that have joined."""

import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from threading import Barrier
from typing import Any

from millrace_serve.engine.lockstep.join import Exchange, join
from millrace_serve.engine.lockstep.lockstep import Lockstep

LIMIT_S = 120.0
WARM_UP = 20  # steps
Step = Callable[[], Any]  # may return seconds, in the place of those that it took
Make = Callable[[int, Exchange], Step]  # a rank and its exchange -> its step


def measure(ranks: int, make: Make, steps: int) -> tuple[list[float], float]:
    """CPU microseconds per step of each rank's process, and wall microseconds per step, or what the last rank says."""
    context = mp.get_context("fork")  # 72 imports of torch would take minutes
    pipes = [context.Pipe() for _ in range(ranks)]
    jobs = [(rank, make, steps, theirs) for rank, (_, theirs) in enumerate(pipes)]
    processes = [context.Process(target=_rank, args=job, daemon=True) for job in jobs]
    for process in processes:
        process.start()
    results: list[tuple[float, float]] = []
    while not results:
        if not all(ours.poll(LIMIT_S) for ours, _ in pipes):
            raise RuntimeError(f"a rank has not answered for {LIMIT_S:.0f} s")
        said = [ours.recv() for ours, _ in pipes]
        if isinstance(said[0], tuple):
            results = said
        for ours, _ in pipes:
            ours.send(said)
    for process in processes:
        process.join()
    return [round(cpu, 1) for cpu, _ in results], round(results[-1][1], 1)


def _rank(rank: int, make: Make, steps: int, pipe: Connection) -> None:
    def exchange(mine: bytes) -> list[bytes]:
        pipe.send(mine)
        return list(pipe.recv())

    step = make(rank, exchange)
    for _ in range(WARM_UP):
        step()
    exchange(b"")
    cpu, wall = time.process_time(), time.perf_counter()
    said = [step() for _ in range(steps)]
    cpu, wall = time.process_time() - cpu, (time.perf_counter() - wall) / steps
    pipe.send((cpu / steps * 1e6, (statistics.median(said) if isinstance(said[0], float) else wall) * 1e6))
    pipe.recv()  # nobody leaves before all have said this
    os._exit(0)


def exchanges(size: int) -> list[Exchange]:
    """For ranks that are threads of this process."""
    barrier, said = Barrier(size, timeout=LIMIT_S), [b""] * size

    def of(rank: int) -> Exchange:
        def exchange(mine: bytes) -> list[bytes]:
            said[rank] = mine
            barrier.wait()
            everybody = list(said)
            barrier.wait()
            return everybody

        return exchange

    return [of(rank) for rank in range(size)]


def threads(replicas: int, hosts: int) -> list[Lockstep]:
    with ThreadPoolExecutor(replicas) as pool:
        ranks = [pool.submit(joined, rank, 1, replicas, hosts, each) for rank, each in enumerate(exchanges(replicas))]
        return [rank.result() for rank in ranks]


def joined(rank: int, tp: int, dp: int, hosts: int, exchange: Exchange) -> Lockstep:
    return join(rank, tp, dp, exchange, host=str(rank * hosts // (tp * dp)))
