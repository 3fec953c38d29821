"""Arrays of the host to the device in one copy, and results back without waiting.

slot      step n uses slot n % NUM_SLOTS; its arrays and results lie there until its results have been read
upload    all arrays of a step are packed into pinned memory and copied at once; msgspec finds them in the batch,
          and makes the same batch with tensors in their place
download  tensors are copied to pinned memory behind the step; `read` waits for that and gives arrays
"""

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import numpy as np
import torch
from torch import Tensor

from millrace_serve.engine.lockstep.packing import ALIGN, place
from millrace_serve.engine.step.device import Device

T = TypeVar("T")

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

    def upload(self, slot: int, batch: object, kind: type[T]) -> T:
        """A batch of arrays, which msgspec knows, as one of tensors. They live until the next upload."""
        arrays: list[np.ndarray] = []

        def number(array: object) -> int:
            if not isinstance(array, np.ndarray):
                raise TypeError(f"a batch has no {type(array).__name__}")
            arrays.append(array)
            return len(arrays) - 1

        plain = msgspec.to_builtins(batch, enc_hook=number)
        tensors = self._send(slot, arrays)
        return msgspec.convert(plain, kind, dec_hook=lambda _, index: tensors[index])

    def download(self, slot: int, answers: dict[str, Tensor]) -> Callable[[], dict[str, np.ndarray]]:
        """Return a function that waits for the device and gives them as arrays."""
        offsets, total = place([tensor.nbytes for tensor in answers.values()])
        host, _ = self._down[slot] = _roomy(self._device, self._down[slot], total)
        parts = {
            name: _part(host, offset, tensor.shape, tensor.dtype).copy_(tensor, non_blocking=True)
            for (name, tensor), offset in zip(answers.items(), offsets, strict=True)
        }
        wait = self._device.record()

        def read() -> dict[str, np.ndarray]:
            wait()
            return {name: part.numpy().copy() for name, part in parts.items()}

        return read

    def _send(self, slot: int, arrays: Sequence[np.ndarray]) -> list[Tensor]:
        offsets, total = place([array.nbytes for array in arrays])
        host, flat = self._up[slot] = _roomy(self._device, self._up[slot], total)
        for array, offset in zip(arrays, offsets, strict=True):
            np.copyto(flat[offset : offset + array.nbytes].view(array.dtype).reshape(array.shape), array)
        if self._memory is not None and self._memory.shape[0] < total:
            self._memory = self._allocate(total)
        memory = self._device.send(host[:total], self._memory)
        return [
            _part(memory, offset, array.shape, DTYPES[array.dtype])
            for array, offset in zip(arrays, offsets, strict=True)
        ]

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
