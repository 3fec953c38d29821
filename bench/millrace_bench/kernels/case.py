"""What one measurement of an op is. A group (`dense.py`, ...) is a module with `cases(device) -> Iterator[Case]`: V3's
shapes on a GPU, tiny ones on a CPU, where only references run.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from millrace_kernels import backend
from torch import Tensor

from millrace_bench.data import read_data

Call = Callable[[], object]
ANCHORS = read_data("anchors.yaml")


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape, and the least work that it can be: every byte read or written once."""

    op: str  # `module.function`
    shape: str  # for readers, "T=1 2112x7168 qkv_a"
    make: Callable[[], dict[str, Call]]  # draws new inputs; every implementation by name, all on the same inputs
    nbytes: float
    flops: float
    anchor_us: float | None = None  # a published time of this work on an H200
    anchor: str = ""  # whose
    math: Literal["fp8", "bf16"] = "bf16"  # whose peak bounds the flops
    exact: str = ""  # the implementation whose result the others' are compared with


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def candidates(op: str, call: Call, device: torch.device, size: int = 0) -> dict[str, Call]:
    """`call` with each implementation of `op` in the table that serves `size` here, or with its reference. A module's
    second one is named with its function.
    """
    served = [row.target for row in backend.choices(op, device) if row.min_size <= size <= row.max_size]
    found: dict[str, Call] = {}
    for target in served:
        path, _, function = target.partition(":")
        label = path.removeprefix("millrace_kernels.") or "ref"  # millrace_kernels.triton.rms_norm -> triton.rms_norm
        found[f"{label}:{function}" if label in found else label] = functools.partial(forced, op, target, call)
    return found or {"ref": call}


def forced(op: str, target: str, call: Call) -> object:
    """`call` with one implementation of `op`; an empty target is the reference."""
    with backend.forced(**{op: target}):
        return call()
