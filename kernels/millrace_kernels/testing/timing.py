"""How long an op takes: the median over repeated calls, after a warm-up."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch


def time_us(call: Callable[[], object], device: torch.device, budget_s: float = 0.2, min_calls: int = 5) -> float:
    """Median microseconds of one call; CUDA calls are timed by events around each call."""
    call()
    samples: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(samples) < min_calls or time.perf_counter() < deadline:
        samples.append(_cuda_us(call) if device.type == "cuda" else _cpu_us(call))
    return statistics.median(samples)


def _cpu_us(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


def _cuda_us(call: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3
