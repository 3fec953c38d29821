"""A safetensors file whose tensors are read straight into their place, several blocks at a time.

Mapped into memory, as the library does it, a file comes from the disk page by page, and a tensor is copied once more
(`python -m millrace_bench.load` compares). Here threads read blocks: into the tensor itself where it is in the host's
memory, through pinned memory into a GPU's.
"""

import contextlib
import json
import operator
import os
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from millrace_common.json_values import JsonObject
from millrace_common.model_files import HEAD_BYTES, fault
from torch import Tensor

BLOCK_BYTES = 8 << 20
THREADS = 8
MOST_HEADER_BYTES = 100 << 20  # as the library has it
DTYPES = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}


class Stored(NamedTuple):
    """A tensor in its file."""

    name: str
    file: "TensorFile"
    dtype: str  # of DTYPES, or one that cannot be read
    shape: tuple[int, ...]
    offset: int  # in the file


class TensorFile:
    def __init__(self, path: Path) -> None:
        """Raises OSError or ValueError when it is not a whole file of this format."""
        self.path = path
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(path.open("rb", buffering=0))
            self.fd = self._file.fileno()
            self.tensors = self._header()
            stack.pop_all()  # a whole file stays open for reads

    def close(self) -> None:
        """No read may be under way."""
        self._file.close()

    def _header(self) -> dict[str, Stored]:
        size, head = os.fstat(self.fd).st_size, self._file.read(HEAD_BYTES)
        header_bytes = int.from_bytes(head[:8], "little")
        if why := fault(head):
            raise ValueError(why)
        if len(head) < 8 or header_bytes > min(size - 8, MOST_HEADER_BYTES):
            raise ValueError("the header is cut off, or this is no safetensors file")
        try:
            header = json.loads(os.pread(self.fd, header_bytes, 8))
            facts = {name: entry for name, entry in header.items() if name != "__metadata__"}
            return {name: self._stored(name, entry, 8 + header_bytes, size) for name, entry in facts.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"malformed header: {error}") from error

    def _stored(self, name: str, entry: JsonObject, begin: int, size: int) -> Stored:
        first, last = map(operator.index, entry["data_offsets"])
        shape = tuple(map(int, entry["shape"]))
        if not 0 <= first <= last <= size - begin:
            raise ValueError(f"the file ends before byte {begin + last}")
        dtype = DTYPES.get(entry["dtype"])
        if dtype is not None and last - first != prod(shape) * dtype.itemsize:
            raise ValueError(f"{last - first} bytes are not a tensor of shape {list(shape)} and {entry['dtype']}")
        return Stored(name, self, entry["dtype"], shape, begin + first)


class NotFinite(ValueError):
    """A tensor has a NaN or an infinite number; the message names the file and the tensor."""


class TensorReader:
    """Reads of several tensors, which `wait` ends. Every number is looked at while its block is in the cache."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="weights")
        self._pinned = threading.local()
        self._reads: list[Future[None]] = []

    def tensor(self, stored: Stored, rows: tuple[int, int] | None, device: torch.device) -> Tensor:
        """Rows of a tensor, as they are stored; there after `wait`."""
        first, last = rows or (0, stored.shape[0] if stored.shape else 1)
        shape = (last - first, *stored.shape[1:]) if stored.shape else ()
        out = torch.empty(shape, dtype=DTYPES[stored.dtype], device=device)
        self.start(stored, first, out)
        return out

    def start(self, stored: Stored, first: int, out: Tensor) -> None:
        """Read rows from `first` on into `out`: contiguous, of the stored dtype."""
        row_bytes = prod(stored.shape[1:]) * out.dtype.itemsize
        offset, target = stored.offset + first * row_bytes, out.view(-1).view(torch.uint8)
        for begin, block in _blocks(target):
            self._reads.append(self._threads.submit(self._read, stored, offset + begin, block))

    def close(self) -> None:
        """Ends its threads; reads that have not begun are left out."""
        self._threads.shutdown(cancel_futures=True)

    def wait(self) -> None:
        """Raises OSError, which names the file, and NotFinite."""
        reads, self._reads = self._reads, []
        for read in reads:
            read.result()

    @torch.inference_mode()  # which a thread does not take over from those that wait, and their tensors may need
    def _read(self, stored: Stored, offset: int, target: Tensor) -> None:
        if target.device.type == "cpu":
            _fill(stored.file, offset, target)
        else:
            if not hasattr(self._pinned, "block"):
                self._pinned.block = torch.empty(BLOCK_BYTES, dtype=torch.uint8, pin_memory=True)
            staged = self._pinned.block[: target.numel()]
            _fill(stored.file, offset, staged)
            target.copy_(staged)
        if not all_finite(target.view(DTYPES[stored.dtype])):
            raise NotFinite(f"{stored.file.path}: tensor {stored.name} has a NaN or an infinite number")


def _blocks(target: Tensor) -> Iterator[tuple[int, Tensor]]:
    for begin in range(0, target.numel(), BLOCK_BYTES):
        yield begin, target[begin : begin + BLOCK_BYTES]


def _fill(file: TensorFile, offset: int, target: Tensor) -> None:
    left = target.numpy().data
    while left:
        try:
            count = os.preadv(file.fd, [left], offset)
        except OSError as error:
            raise OSError(f"{file.path}: cannot be read at byte {offset}: {error.strerror}") from error
        if not count:
            raise OSError(f"{file.path}: the file ends at byte {offset}")
        left, offset = left[count:], offset + count


def all_finite(numbers: Tensor) -> bool:
    """In one pass without a copy. numbers: one dimension, of DTYPES."""
    if not numbers.numel() or not numbers.dtype.is_floating_point:
        return True
    if numbers.dtype == torch.float8_e4m3fn:  # its NaNs are 0x7f and 0xff, and it has no infinity
        return bool(numbers.view(torch.int8).amax() < 0x7F) and bool(numbers.view(torch.uint8).amax() < 0xFF)
    if numbers.dtype.itemsize == 1:
        numbers = numbers.float()
    least, most = torch.aminmax(numbers)  # a NaN is both
    return bool(torch.isfinite(least) & torch.isfinite(most))
