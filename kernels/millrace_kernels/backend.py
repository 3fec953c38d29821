"""The only place that chooses an implementation of an op.

An op is named `module.function`. `TABLE` maps (op, capability) to the implementation measured fastest there, written as
`import.path:function`; an op without an entry runs its reference, on every device.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

import torch

TABLE: dict[tuple[str, str], str] = {}


def capability(device: torch.device) -> str:
    """`cpu`, or `sm90` for a CUDA device of compute capability 9.0."""
    if device.type != "cuda":
        return device.type
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


@functools.cache
def implementation(op: str, device: torch.device) -> Callable[..., Any]:
    """The function that runs `op` on tensors of `device`; it has the signature of the op."""
    module, function = op.split(".")
    target = TABLE.get((op, capability(device)), f"millrace_kernels.ref.{module}:{function}")
    path, name = target.split(":")
    return getattr(importlib.import_module(path), name)
