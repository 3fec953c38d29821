"""Calls of the CUDA driver for reading another process's memory, through ctypes: no torch, no build."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

IPC_HANDLE_BYTES = 64
_NOT_READY = 600
_LAZY_PEER_ACCESS = 1
_NON_BLOCKING_STREAM = 1
_NO_TIMING = 2


class CudaError(RuntimeError):
    """A call of the driver failed; the message names the call and the driver's reason."""


class _IpcHandle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * IPC_HANDLE_BYTES),)


class CudaDriver:
    """One device's primary context, which torch uses too, current on the calling thread after `bind`."""

    def __init__(self, device_id: int) -> None:
        self._lib = _library()
        self._device = ctypes.c_int()
        self._context = ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), device_id)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)

    def bind(self) -> None:
        """Bind the calling thread; every thread calls this before anything below."""
        self._call("cuCtxSetCurrent", self._context)

    def export(self, address: int) -> tuple[bytes, int]:
        """A handle that another process can open, and how far `address` lies inside of what it opens."""
        base, size, handle = ctypes.c_uint64(), ctypes.c_size_t(), _IpcHandle()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), base)
        return bytes(ctypes.string_at(ctypes.addressof(handle), IPC_HANDLE_BYTES)), address - base.value

    def open(self, handle: bytes) -> int:
        """Address here of the memory that `export` named."""
        address, opened = ctypes.c_uint64(), _IpcHandle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), opened, _LAZY_PEER_ACCESS)
        return address.value

    def close(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def stream(self) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        self._call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING_STREAM)
        return stream

    def copy(self, dst: int, src: int, nbytes: int, stream: ctypes.c_void_p) -> None:
        """Device to device, asynchronous."""
        addresses = ctypes.c_uint64(dst), ctypes.c_uint64(src)
        self._call("cuMemcpyDtoDAsync_v2", *addresses, ctypes.c_size_t(nbytes), stream)

    def record(self, stream: ctypes.c_void_p) -> ctypes.c_void_p:
        """An event at the stream's end."""
        event = ctypes.c_void_p()
        self._call("cuEventCreate", ctypes.byref(event), _NO_TIMING)
        self._call("cuEventRecord", event, stream)
        return event

    def reached(self, event: ctypes.c_void_p) -> bool:
        status = self._lib.cuEventQuery(event)
        if status not in (0, _NOT_READY):
            raise CudaError(f"cuEventQuery: {self._reason(status)}")
        return status == 0

    def destroy_event(self, event: ctypes.c_void_p) -> None:
        self._call("cuEventDestroy_v2", event)

    def wait(self, stream: ctypes.c_void_p) -> None:
        self._call("cuStreamSynchronize", stream)

    def destroy_stream(self, stream: ctypes.c_void_p) -> None:
        self._call("cuStreamDestroy_v2", stream)

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._lib, name)(*arguments)
        if status:
            raise CudaError(f"{name}: {self._reason(status)}")

    def _reason(self, status: int) -> str:
        text = ctypes.c_char_p()
        self._lib.cuGetErrorString(status, ctypes.byref(text))
        return (text.value or b"unknown error").decode() + f" ({status})"


@functools.cache
def _library() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise CudaError(f"the CUDA driver cannot be loaded: {error}") from None
