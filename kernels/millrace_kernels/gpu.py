"""This process's GPU, as far as configurations of kernels depend on it."""

import functools
from typing import NamedTuple

import torch

from millrace_kernels.backend import capability


class Gpu(NamedTuple):
    name: str
    capability: str
    sms: int  # multiprocessors

    def __str__(self) -> str:
        return f"{self.name} ({self.capability}, {self.sms} multiprocessors)"


H200 = Gpu("NVIDIA H200", "sm90", 132)  # on which most was measured
H200_SHARED = 227 << 10  # bytes
RESERVED_SHARED = 2 << 10  # of a program, for other things than its stages


@functools.cache
def gpu() -> Gpu:
    """Without a GPU, the one on which most was measured."""
    if not torch.cuda.is_available():
        return H200
    device = torch.device("cuda", torch.cuda.current_device())
    count = torch.cuda.get_device_properties(device).multi_processor_count
    return Gpu(torch.cuda.get_device_name(device), capability(device), int(count))


def sms() -> int:
    """Multiprocessors of this process's GPU; without one, those of an H200."""
    return gpu().sms


@functools.cache
def shared_bytes() -> int:
    """Shared memory that a program can have; without a GPU, that of an H200."""
    if not torch.cuda.is_available():
        return H200_SHARED
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]  # torch's stub lacks it


def fitting(stages: int, stage_bytes: int, fixed_bytes: int = 0) -> int:
    """How many of a pipeline's `stages` fit into the shared memory beside `fixed_bytes`; one at least."""
    return max(1, min(stages, (shared_bytes() - RESERVED_SHARED - fixed_bytes) // stage_bytes))
