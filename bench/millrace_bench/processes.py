"""What benches of ranks share: a process for each rank, its device, the group that it joins, and its rows."""

import gc
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from millrace_load.record import Row
from millrace_serve.engine.step.device import device_of
from millrace_serve.model.parallel import ParallelDims, init_parallel, leave_parallel
from torch import multiprocessing

from millrace_bench.shard import time_ms

CALLS = 20


class Ranks(NamedTuple):
    """Of one host, numbered from 0: on a GPU each, or on the CPU."""

    num: int
    device: str = "cuda"  # or "cpu"
    tensor_parallel: bool = False  # one replica, instead of a replica on each rank
    timeout_s: float = 60.0  # until all have come

    def run(self, work: Callable[..., list[Row]], *args: Any) -> list[list[Row]]:
        """The rows of each rank: what `work(dims, device, *args)` gives in its process."""
        with tempfile.TemporaryDirectory(prefix="millrace-ranks-") as folder:
            spawn(self.num, self._main, work, folder, args)
            return [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(self.num)]

    def join(self, rank: int, folder: str) -> tuple[ParallelDims, torch.device]:
        """Of this process. `folder`: where all of them meet."""
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        if self.device == "cpu":
            torch.set_num_threads(1)
            device = torch.device("cpu")
        else:
            device = torch.device("cuda", rank)
            torch.cuda.set_device(device)
        tp, dp = (self.num, 1) if self.tensor_parallel else (1, self.num)
        return init_parallel(rank, tp, dp, f"file://{folder}/rendezvous", device, self.timeout_s), device

    def _main(self, rank: int, work: Callable[..., list[Row]], folder: str, args: tuple[Any, ...]) -> None:
        rows = work(*self.join(rank, folder), *args)
        (Path(folder) / f"{rank}.json").write_text(json.dumps(rows))


def spawn(num_ranks: int, function: Callable[..., None], *args: Any, join: bool = True) -> Any:
    """function(rank, *args) in a process for each rank; as torch.multiprocessing.spawn.

    The groups that `function` has made end behind it: a group lives as long as something refers to it, and one that
    meets the end of the interpreter may abort the process.
    """
    return multiprocessing.spawn(_main, (function, args), nprocs=num_ranks, join=join)


def _main(rank: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
    function(rank, *args)
    gc.collect()  # models are full of cycles
    leave_parallel()


def call_us(call: Callable[[], object], repeats: int, device: torch.device, graph: bool = True) -> float:
    """Median microseconds of one of CALLS calls back to back, in a graph or launched each. Collective."""

    def calls() -> None:
        for _ in range(CALLS):
            call()

    calls()
    device_of(device).synchronize()
    replay = device_of(device).capture(calls) if graph else calls
    dist.barrier()
    return statistics.median(time_ms(replay, repeats, device)) / CALLS * 1e3


def slowest(of_ranks: list[list[Row]], key: str) -> list[Row]:
    """Of each row the one whose rank took longest: all of them wait for it."""
    return [max(same, key=lambda row: row[key]) for same in zip(*of_ranks, strict=True)]
