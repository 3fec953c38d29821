"""Ranks that have joined, as threads of a test or as processes that it may stop and kill."""

import multiprocessing as mp
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, Self

from millrace_bench.stepping_ranks import exchanges
from millrace_serve.engine.lockstep.join import Exchange, join
from millrace_serve.engine.lockstep.links import RankLost
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.lockstep.replicas import ReplicaState, Said
from millrace_testing import HANG_S


def together(jobs: Sequence[Callable[[], Any]]) -> list[Any]:
    """What all of them return, each in a thread."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [future.result(timeout=HANG_S) for future in [pool.submit(job) for job in jobs]]


def ranks_together(job: Callable[[int], Any], count: int) -> list[Any]:
    return together([lambda rank=rank: job(rank) for rank in range(count)])


def join_all(tp: int, hosts: str) -> list[Lockstep]:
    """The ranks of a worker in threads; one letter per rank names its host."""

    def of(rank: int, exchange: Exchange) -> Callable[[], Lockstep]:
        return lambda: join(rank, tp, len(hosts) // tp, exchange, host=hosts[rank])

    return together([of(rank, exchange) for rank, exchange in enumerate(exchanges(len(hosts)))])


class Ranks:
    """The ranks of a worker in processes, which step all the time."""

    def __init__(self, tp: int, hosts: str) -> None:
        mp.set_forkserver_preload(["millrace_serve.engine.lockstep.join"])  # imported once for all ranks
        context = mp.get_context("forkserver")
        pairs = [context.Pipe() for _ in hosts]
        self.pipes = [ours for ours, _ in pairs]
        self.processes = [
            context.Process(target=_rank_main, args=(rank, tp, hosts, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pairs)
        ]
        for process in self.processes:
            process.start()
        said = [pipe.recv() for pipe in self.pipes]
        for pipe in self.pipes:
            pipe.send(said)
        assert [pipe.recv() for pipe in self.pipes] == ["steps"] * len(hosts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()

    def lost(self, rank: int) -> str:
        """The error of a rank."""
        assert self.pipes[rank].poll(HANG_S), f"rank {rank} still waits"
        return str(self.pipes[rank].recv())


def _rank_main(rank: int, tp: int, hosts: str, pipe: Connection) -> None:
    def exchange(mine: bytes) -> list[bytes]:
        pipe.send(mine)
        return list(pipe.recv())

    lockstep = join(rank, tp, len(hosts) // tp, exchange, host=hosts[rank])
    for count in range(10**9):
        try:
            step(lockstep, ReplicaState(rank, count), bytes(100_000))  # so large that buffers are full at once
        except RankLost as error:
            pipe.send(str(error))
            return
        if count == 10:
            pipe.send("steps")


def step(lockstep: Lockstep, state: ReplicaState, data: bytes) -> tuple[list[Said], bytes]:
    """What the replicas said, of a leader, and the batch that the replica's leader sent, of a follower."""
    if lockstep._leader is not None:
        return [], bytes(lockstep._leader.receive_message())
    said = [] if lockstep._replicas is None else lockstep._replicas.all_gather(state, ring=True)
    lockstep._send(data)
    return said, b""
