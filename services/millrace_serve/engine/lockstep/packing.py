"""Places of arrays in one block of bytes, and what a leader sends its followers so: a batch, or copies of pages."""

import struct

import msgspec
import numpy as np

from millrace_serve.engine.offload.page_copier import PageMoves
from millrace_serve.engine.step.batch import HostBatch

ALIGN = 16  # bytes, for the vector loads of kernels
SIZE = struct.Struct("=Q")


class Copies(msgspec.Struct, frozen=True, array_like=True):
    """`settled`: the leader has the results of every launched step."""

    moves: list[PageMoves]
    settled: bool


Message = HostBatch | Copies


def place(sizes: list[int]) -> tuple[list[int], int]:
    """Offsets of blocks of `sizes` bytes that follow each other, each aligned, and the bytes of all."""
    offsets, end = [], 0
    for size in sizes:
        offsets.append(end)
        end += -(-size // ALIGN) * ALIGN
    return offsets, end


def encode(message: Message) -> bytearray:
    """`size of the head | head | arrays`: the head is the message in msgpack, with dtype and shape for each array."""
    arrays: list[np.ndarray] = []

    def spec(array: np.ndarray) -> tuple[str, tuple[int, ...]]:
        arrays.append(array)
        return array.dtype.str, array.shape

    head = msgspec.msgpack.encode(message, enc_hook=spec)
    (_, *offsets), total = place([SIZE.size + len(head), *(array.nbytes for array in arrays)])
    data = bytearray(total)
    SIZE.pack_into(data, 0, len(head))
    data[SIZE.size : SIZE.size + len(head)] = head
    for array, offset in zip(arrays, offsets, strict=True):
        np.copyto(np.frombuffer(data, array.dtype, array.size, offset).reshape(array.shape), array)
    return data


def decode(data: bytes | bytearray | memoryview) -> Message:
    """The message that was encoded, with arrays of its own."""
    arrays: list[np.ndarray] = []

    def make(_: type, spec: tuple[str, tuple[int, ...]]) -> np.ndarray:
        arrays.append(np.empty(spec[1], spec[0]))
        return arrays[-1]

    view = memoryview(data)
    (size,) = SIZE.unpack_from(view)
    message: Message = msgspec.msgpack.decode(view[SIZE.size : SIZE.size + size], type=Message, dec_hook=make)
    (_, *offsets), _ = place([SIZE.size + size, *(array.nbytes for array in arrays)])
    for array, offset in zip(arrays, offsets, strict=True):
        np.copyto(array, np.frombuffer(view, array.dtype, array.size, offset).reshape(array.shape))
    return message
