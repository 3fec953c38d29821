"""Small tables of integers that the host fills and a kernel reads."""

import functools

import torch
from torch import Tensor


@functools.lru_cache(maxsize=64)
def host_table(rows: tuple[tuple[int, ...], ...], device: torch.device) -> Tensor:
    """int32 [len(rows), N] on `device`. All layers of a step ask for the same table: it travels once, without a
    synchronisation, on the stream that is current at the first call. Read-only.
    """
    table = torch.tensor(rows, dtype=torch.int32)
    if device.type == "cuda":
        table = table.pin_memory()
    return table.to(device, non_blocking=True)
