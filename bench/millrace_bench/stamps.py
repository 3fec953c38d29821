"""Moments on a device's stream; on a CPU, where work is done when a call returns, moments of the host's clock."""

import time
from typing import Any

import torch

Stamp = Any  # torch.cuda.Event, or float seconds


def stamp(device: torch.device) -> Stamp:
    """Now, behind all that was launched on the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds(start: Stamp, end: Stamp) -> float:
    """Both must have happened."""
    return float(start.elapsed_time(end)) if isinstance(start, torch.cuda.Event) else (end - start) * 1e3


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
