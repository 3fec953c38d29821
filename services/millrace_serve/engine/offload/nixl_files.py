"""Pages of host memory to and from files, over NIXL's POSIX backend."""

from __future__ import annotations

import time
from typing import Any

from millrace_serve.transfer.base import PageBuffer, TransferError
from millrace_serve.transfer.nixl_agent import errors_of, load_bindings, new_agent

POLL_S = 50e-6


class NixlFiles:
    """Not thread-safe: one thread owns it. `pool` is host memory; the caller keeps it alive until `close`."""

    def __init__(self, pool: PageBuffer) -> None:
        """Raises TransferError when the backend cannot be used."""
        self._lib = lib = load_bindings()
        self._errors = errors_of(lib)
        self._name = f"files-{id(self):x}"  # of this process alone: no other agent hears of it
        self._agent = new_agent(lib, self._name, progress_thread=False)
        self._pool = pool
        try:
            self._backend = self._agent.createBackend("POSIX", {})
            self._memory = lib.nixlRegDList(lib.DRAM_SEG, [(pool.address, pool.nbytes, 0, "")])
            self._agent.registerMem(self._memory, [self._backend])
        except self._errors as error:
            raise TransferError(f"NIXL cannot use its POSIX backend for {pool.nbytes} bytes: {error}") from error

    def write(self, page: int, fd: int) -> None:
        """Write page `page` of the pool to the start of a file. Raises TransferError."""
        self._copy(self._lib.NIXL_WRITE, page, fd)

    def read(self, page: int, fd: int) -> None:
        """Read page `page` of the pool from the start of a file. Raises TransferError."""
        self._copy(self._lib.NIXL_READ, page, fd)

    def close(self) -> None:
        self._agent.deregisterMem(self._memory, [self._backend])
        del self._agent  # destroys the backend

    def _copy(self, direction: Any, page: int, fd: int) -> None:
        lib, agent, size = self._lib, self._agent, self._pool.page_bytes
        file = lib.nixlRegDList(lib.FILE_SEG, [(0, size, fd, "")])
        memory = lib.nixlXferDList(lib.DRAM_SEG, [(self._pool.address + page * size, size, 0)])
        try:
            agent.registerMem(file, [self._backend])
            try:
                self._wait(agent.createXferReq(direction, memory, file.trim(), self._name, b"", [self._backend]))
            finally:
                agent.deregisterMem(file, [self._backend])
        except self._errors as error:
            raise TransferError(f"NIXL cannot copy a page of {size} bytes: {error}") from error

    def _wait(self, request: int) -> None:
        try:
            status = self._agent.postXferReq(request, b"")
            while status != self._lib.NIXL_SUCCESS:
                time.sleep(POLL_S)
                status = self._agent.getXferStatus(request)
        finally:
            self._agent.releaseXferReq(request)
