"""One NIXL agent: UCX backend, one registered pool. The only file that imports NIXL.

NIXL's native bindings are used directly instead of its Python `nixl_agent`, because that class cannot set how often the
progress thread wakes: it then spins, and an idle exporter costs a whole core. The bindings need numpy but no torch.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import uuid
from types import ModuleType
from typing import Any

import msgspec
import numpy as np

from millrace_serve.transfer.base import PageBuffer, TransferError


class NixlConfig(msgspec.Struct, frozen=True, kw_only=True):
    ucx: dict[str, str] = {}  # UCX settings without the UCX_ prefix, values without commas: {"NET_DEVICES": "lo"}
    devices: tuple[str, ...] = ()  # RDMA devices to use, for example ("mlx5_0",); empty = UCX chooses
    init_timeout_s: float = 60.0  # creating the backend
    wake_interval_s: float = 0.01  # the exporter's progress thread wakes this often even without an event; >= 1 ms
    settle_s: float = 0.05  # from an endpoint's error to FAILED

    def backend_params(self) -> dict[str, str]:
        params = {"ucx_error_handling_mode": "peer"}  # a dead peer must end our reads
        if self.devices:
            params["ucx_devices"] = ", ".join(self.devices)
        if self.ucx:
            params["engine_config"] = ",".join(f"{key}={value}" for key, value in self.ucx.items())
        return params


class NixlAgent:
    """One NIXL agent with a UCX backend and our pool registered."""

    def __init__(self, label: str, pool: PageBuffer, config: NixlConfig, *, progress_thread: bool) -> None:
        self.lib = load_bindings()
        self.errors = tuple(
            getattr(self.lib, name) for name in dir(self.lib) if name.startswith("nixl") and name.endswith("Error")
        )
        self.name = f"{label}-{uuid.uuid4().hex}"
        self.pool = pool
        self.closed = False
        agent_config = self.lib.nixlAgentConfig()
        agent_config.useProgThread = progress_thread
        agent_config.useListenThread = False
        agent_config.captureTelemetry = False
        agent_config.pthrDelay = int(config.wake_interval_s * 1e6)
        agent_config.syncMode = self.lib.NIXL_THREAD_SYNC_STRICT
        self.nixl = self.lib.nixlAgent(self.name, agent_config)
        self.backend = self._create_backend(config)
        self._registered = self.lib.nixlRegDList(
            self.mem_type(pool.mem_type), [(pool.address, pool.nbytes, pool.device_id, "")]
        )
        try:
            self.nixl.registerMem(self._registered, [self.backend])
        except self.errors as error:
            raise TransferError(f"NIXL cannot register {pool.nbytes} bytes of {pool.mem_type}: {error}") from error

    def mem_type(self, name: str) -> Any:
        return {"DRAM": self.lib.DRAM_SEG, "VRAM": self.lib.VRAM_SEG}[name]

    def prepare(self, agent: str, mem_type: str, base: int, page_bytes: int, device_id: int, num_pages: int) -> int:
        """Handle of a descriptor list with one entry per page; agent "" is ourselves."""
        pages = np.array([[base, page_bytes, device_id, page_bytes, num_pages]], dtype=np.uint64)
        owner = agent or self.lib.NIXL_INIT_AGENT
        return self.nixl.prepXferDlist(owner, self.mem_type(mem_type), pages, [self.backend])

    def close(self) -> None:
        """Idempotent."""
        if self.closed:
            return
        self.closed = True
        self.nixl.deregisterMem(self._registered, [self.backend])
        del self.nixl  # destroys the backend

    def _create_backend(self, config: NixlConfig) -> int:
        """UCX may hang in here when a device is broken, hence a thread that can be given up."""
        result: list[int | Exception] = []

        def create() -> None:
            try:
                result.append(self.nixl.createBackend("UCX", config.backend_params()))
            except self.errors as error:
                result.append(error)

        thread = threading.Thread(target=create, name="nixl-init", daemon=True)
        thread.start()
        thread.join(config.init_timeout_s)
        if not result:
            raise TransferError(f"NIXL's UCX backend was not ready after {config.init_timeout_s:g} s")
        if isinstance(result[0], Exception):
            raise TransferError(f"NIXL cannot create its UCX backend with {config.backend_params()}: {result[0]}")
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
