"""One NIXL agent: UCX backend, one registered pool; and the bindings, which only this file imports.

NIXL's native bindings are used directly instead of its Python `nixl_agent`, because that class cannot set how often the
progress thread wakes: it then spins, and an idle exporter costs a whole core. The bindings need numpy but no torch.
"""

import contextlib
import importlib
import importlib.util
import sys
import threading
import uuid
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from millrace_serve.transfer.base import MemoryHandle, PageBuffer, TransferError

INIT_TIMEOUT_S = 60.0  # creating the backend
WAKE_INTERVAL_S = 0.01  # the exporter's progress thread wakes this often even without an event; at least 1 ms


class NixlAgent:
    def __init__(self, pool: PageBuffer, ucx: Mapping[str, str], *, progress_thread: bool) -> None:
        """`ucx`: settings without the UCX_ prefix, values without commas: {"NET_DEVICES": "lo"}."""
        self.lib = load_bindings()
        names = (name for name in dir(self.lib) if name.startswith("nixl") and name.endswith("Error"))
        self.errors: tuple[type[Exception], ...] = tuple(getattr(self.lib, name) for name in names)
        self.name = f"kv-{uuid.uuid4().hex}"
        self.pool = pool
        self.closed = False
        self.nixl = new_agent(self.lib, self.name, progress_thread)
        self.backend = self._create_backend(ucx)
        self._registered = self.lib.nixlRegDList(
            self.mem_type(pool.mem_type), [(pool.address, pool.nbytes, pool.device_id, "")]
        )
        try:
            self.nixl.registerMem(self._registered, [self.backend])
        except self.errors as error:
            raise TransferError(f"NIXL cannot register {pool.nbytes} bytes of {pool.mem_type}: {error}") from error

    def mem_type(self, name: str) -> object:
        return {"DRAM": self.lib.DRAM_SEG, "VRAM": self.lib.VRAM_SEG}[name]

    def prepare(self, agent: str, base: int, pool: PageBuffer | MemoryHandle) -> int:
        """Handle of a descriptor list with one entry per page of `pool`, from `base` on; agent "" is ourselves."""
        size = pool.page_bytes
        pages = np.array([[base, size, pool.device_id, size, pool.num_pages]], dtype=np.uint64)
        owner = agent or self.lib.NIXL_INIT_AGENT
        return self.nixl.prepXferDlist(owner, self.mem_type(pool.mem_type), pages, [self.backend])

    def close(self) -> None:
        """Idempotent."""
        if self.closed:
            return
        self.closed = True
        with contextlib.suppress(*self.errors):  # the backend must go whatever this says
            self.nixl.deregisterMem(self._registered, [self.backend])
        del self.nixl  # destroys the backend

    def _create_backend(self, ucx: Mapping[str, str]) -> int:
        """UCX may hang in here when a device is broken, hence a thread that can be given up."""
        params = {"ucx_error_handling_mode": "peer"}  # a dead peer must end our reads
        if ucx:
            params["engine_config"] = ",".join(f"{key}={value}" for key, value in ucx.items())
        result: list[int | Exception] = []

        def create() -> None:
            try:
                result.append(self.nixl.createBackend("UCX", params))
            except self.errors as error:
                result.append(error)

        thread = threading.Thread(target=create, name="nixl-init", daemon=True)
        thread.start()
        thread.join(INIT_TIMEOUT_S)
        if not result:
            raise TransferError(f"NIXL's UCX backend was not ready after {INIT_TIMEOUT_S:g} s")
        if isinstance(result[0], Exception):
            raise TransferError(f"NIXL cannot create its UCX backend with {params}: {result[0]}")
        return result[0]


def load_bindings() -> ModuleType:
    """NIXL's native module.

    Its package `nixl` chooses the build for our CUDA version, but imports torch to find out when torch is a CPU build.
    """
    if "torch" in sys.modules:
        return importlib.import_module("nixl")._bindings
    for name in ("nixl_cu13", "nixl_cu12"):
        if importlib.util.find_spec(name):
            return importlib.import_module(f"{name}._bindings")
    raise TransferError("NIXL is not installed: neither nixl_cu13 nor nixl_cu12 can be imported")


def new_agent(lib: ModuleType, name: str, progress_thread: bool) -> Any:  # NIXL has no types
    """NIXL's agent, without a backend."""
    config = lib.nixlAgentConfig()
    config.useProgThread = progress_thread
    config.useListenThread = False
    config.captureTelemetry = False
    config.pthrDelay = int(WAKE_INTERVAL_S * 1e6)
    config.syncMode = lib.NIXL_THREAD_SYNC_STRICT
    return lib.nixlAgent(name, config)
