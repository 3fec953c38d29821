"""Arrays of the host to the device in one copy, and results back without waiting.

slot      step n uses slot n % NUM_SLOTS; its arrays and results lie there until its results have been read
upload    all arrays of a step, wherever they are in a tree of dataclasses, dicts, lists and tuples, are packed
          into pinned memory and copied at once; the same tree comes back with tensors in the place of arrays
download  tensors are copied to pinned memory behind the step; `read` waits for that and gives a tree of arrays
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

from millrace_serve.engine.lockstep.packing import ALIGN, place
from millrace_serve.engine.step.device import Device

NUM_SLOTS = 3  # one runs, one waits behind it, one is being read
DTYPES = {
    np.dtype(bool): torch.bool,
    np.dtype(np.uint8): torch.uint8,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.uint64): torch.int64,  # the same bits; few kernels support uint64
    np.dtype(np.float32): torch.float32,
}


class Staging:
    """Not thread-safe, but for `read` of what `download` returned."""

    def __init__(self, device: Device, nbytes: int) -> None:
        """`nbytes` that the arrays of a step usually need; more is found when a step needs more."""
        self._device = device
        self._up = [_pinned(device, nbytes) for _ in range(NUM_SLOTS)]
        self._down = [_pinned(device, ALIGN) for _ in range(NUM_SLOTS)]
        self._memory = self._allocate(nbytes)

    def upload(self, slot: int, tree: Any) -> Any:
        """The tensors live until the next upload."""
        arrays = list(_leaves(tree, np.ndarray))
        offsets, total = place([array.nbytes for array in arrays])
        host, flat = self._up[slot] = _roomy(self._device, self._up[slot], total)
        for array, offset in zip(arrays, offsets, strict=True):
            np.copyto(flat[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape), array)
        if self._memory is not None and self._memory.shape[0] < total:
            self._memory = self._allocate(total)
        memory = self._device.send(host[:total], self._memory)
        tensors = [
            _part(memory, offset, array.shape, DTYPES[array.dtype])
            for array, offset in zip(arrays, offsets, strict=True)
        ]
        return _replaced(tree, np.ndarray, iter(tensors))

    def download(self, slot: int, tree: Any) -> Callable[[], Any]:
        """Return a function that waits for the device and gives the tree with arrays in the place of tensors."""
        tensors = list(_leaves(tree, Tensor))
        offsets, total = place([tensor.nbytes for tensor in tensors])
        host, _ = self._down[slot] = _roomy(self._device, self._down[slot], total)
        parts = [
            _part(host, offset, tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
            for tensor, offset in zip(tensors, offsets, strict=True)
        ]
        wait = self._device.record()

        def read() -> Any:
            wait()
            return _replaced(tree, Tensor, iter([part.numpy().copy() for part in parts]))

        return read

    def _allocate(self, nbytes: int) -> Tensor | None:
        """Memory of the device; None where the host's memory is the device's."""
        if self._device.torch.type == "cpu":
            return None
        return torch.empty(_capacity(nbytes), dtype=torch.uint8, device=self._device.torch)


Pinned = tuple[Tensor, np.ndarray]  # the same uint8 memory twice


def _pinned(device: Device, nbytes: int) -> Pinned:
    host = device.host_buffer(_capacity(nbytes))
    return host, host.numpy()


def _roomy(device: Device, pinned: Pinned, nbytes: int) -> Pinned:
    return pinned if pinned[0].shape[0] >= nbytes else _pinned(device, nbytes)


def _capacity(nbytes: int) -> int:
    return 1 << max(nbytes - 1, 4096 - 1).bit_length()


def _part(memory: Tensor, offset: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    nbytes = math.prod(shape) * dtype.itemsize
    return memory[offset : offset + nbytes].view(dtype).view(shape)


def _leaves(tree: Any, kind: type) -> Iterator[Any]:
    """Depth first, in the order in which `_replaced` asks for them."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from _leaves(value, kind)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from _leaves(value, kind)
    elif dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from _leaves(getattr(tree, field.name), kind)


def _replaced(tree: Any, kind: type, values: Iterator[Any]) -> Any:
    if isinstance(tree, kind):
        return next(values)
    if isinstance(tree, dict):
        return {key: _replaced(value, kind, values) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)([_replaced(value, kind, values) for value in tree])
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = dataclasses.fields(tree)
        return type(tree)(**{field.name: _replaced(getattr(tree, field.name), kind, values) for field in fields})
    return tree
