"""The GPUs for which the measured tables hold.

Configurations of kernels are measured on an H200. The number of programs that run at once decides among them, so they
hold for every Hopper GPU of 132 multiprocessors (H100, H200, H800). Others (an H20 has 78) get estimates from their own
number. `backend.TABLE`, which chooses between libraries and our kernels, is keyed by the compute capability.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch

MEASURED_SMS = 132

_Key = TypeVar("_Key", bound=Hashable)
_Value = TypeVar("_Value")


@functools.cache
def sms() -> int:
    """Multiprocessors of this process's GPU; without one, those of the GPU that was measured."""
    if not torch.cuda.is_available():
        return MEASURED_SMS
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count)


def measured(table: Mapping[_Key, _Value], key: _Key) -> _Value | None:
    """The table's entry, if the table holds for this GPU."""
    return table.get(key) if sms() == MEASURED_SMS else None
