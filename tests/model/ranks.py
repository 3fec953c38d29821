"""Runs a function in several processes joined by gloo, and returns what each of them returned."""

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from millrace_common.grammar import checker
from millrace_serve.model.parallel import init_parallel
from millrace_testing import HANG_S

IMPORTS = ["millrace_serve.model.deepseek_v3", "triton.runtime.interpreter"]  # of every rank, by one process for all
Job = tuple[int, int, Callable[..., Any], tuple[Any, ...]]  # tp, dp, function(dims, *args), args


def run_jobs(jobs: list[Job], directory: Path, *, cuda: bool = False) -> list[list[Any]]:
    """One set of processes for all jobs: starting one costs seconds. Result [job][rank]. `cuda`: each has a GPU."""
    size = max(tp * dp for tp, dp, _, _ in jobs)
    multiprocessing.set_forkserver_preload(IMPORTS)
    start = "spawn" if cuda else "forkserver"
    mp.start_processes(_rank_main, (jobs, str(directory), cuda), nprocs=size, start_method=start)
    return [
        [torch.load(directory / f"{index}-{rank}.pt") for rank in range(tp * dp)]
        for index, (tp, dp, _, _) in enumerate(jobs)
    ]


def _rank_main(rank: int, jobs: list[Job], directory: str, cuda: bool) -> None:
    torch.set_num_threads(1)
    checker.WAIT_S = HANG_S  # as in conftest.py
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    for index, (tp, dp, function, args) in enumerate(jobs):
        if rank >= tp * dp:
            continue
        rendezvous = f"file://{directory}/rendezvous-{index}"
        dims = init_parallel(rank, tp, dp, rendezvous, device, HANG_S)
        torch.save(function(dims, *args), Path(directory) / f"{index}-{rank}.pt")
        if dist.is_initialized():
            dist.destroy_process_group()
