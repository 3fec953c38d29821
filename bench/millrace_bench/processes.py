"""Processes of ranks that compute together."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

from millrace_serve.model.parallel import leave_parallel
from torch import multiprocessing


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
