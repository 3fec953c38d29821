"""The start of DeepEP: whether it can serve these ranks, and the one buffer that a rank has for all layers."""

import ctypes
import importlib
import importlib.util
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from millrace_kernels.moe_masked import BLOCK_ROWS

from millrace_serve.model.config import ModelConfig
from millrace_serve.model.parallel import BOOT_ID, ParallelDims

HOST_RANKS = 8  # of each host, where there are several
RANKS = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
HIDDEN_SIZES = (2048, 2560, 3072, 4096, 5120, 6144, 7168, 8192)
MOST_CHOICES = 11  # experts of a row
MOST_ROWS = 1020  # of a rank in low latency; its kernels count to 1,024
NVSHMEM = "libnvshmem_host.so.3"
LIBRARIES = ("deep_ep", "deep_gemm")
ADAPTERS = Path("/sys/class/infiniband")


class Machine(NamedTuple):
    """Where a rank runs."""

    host: str
    rdma: bool  # it has an adapter whose driver is mlx5, the only one that DeepEP drives
    missing: str  # libraries that cannot be imported, and why


class DeepEpBuffer:
    """Made once per rank, before graphs are captured.

    Attributes:
        most_rows: of a replica in a low-latency step; 0: there is no low latency
        nbytes: device memory that torch does not know of
        error: int32 [1] on the device: 0, or 1 + a rank that did not answer for 100 s, as of the last `ask`
    """

    def __init__(
        self, config: ModelConfig, dims: ParallelDims, num_slots: int, most_rows: int, device: torch.device
    ) -> None:
        """Collective over the replicas, for which `refusal` found nothing.

        Args:
            num_slots: experts that a rank holds
            most_rows: the most rows of a replica's decode steps; 0: this worker has none
        """
        from deep_ep import Buffer

        unit = row_unit(dims.world)
        self.most_rows = -(-most_rows // unit) * unit
        self._shape = self.most_rows, config.hidden_size, num_slots * dims.world
        self._several_hosts = dims.world > HOST_RANKS
        row = 2 * config.hidden_size, dims.world  # bytes of a row in BF16, and the ranks
        ways = Buffer.get_dispatch_config(dims.world), Buffer.get_combine_config(dims.world)
        nvlink = max(way.get_nvl_buffer_size_hint(*row) for way in ways)
        rdma = max(way.get_rdma_buffer_size_hint(*row) for way in ways)
        if most_rows:
            rows, hidden, places = self._shape
            rdma = max(rdma, Buffer.get_low_latency_rdma_size_hint(rows, hidden, dims.world, places))
        self.nbytes = nvlink + rdma
        if not self._several_hosts:  # else NVSHMEM wants an adapter; it sets nothing that is set already
            ctypes.CDLL(None).setenv(b"NVSHMEM_REMOTE_TRANSPORT", b"none", 0)
        self.buffer: Any = Buffer(  # DeepEP has no types
            dims.dp_group,
            nvlink,
            rdma,
            low_latency_mode=most_rows > 0,
            num_qps_per_rank=max(Buffer.num_sms, num_slots),
            explicitly_destroy=True,  # its end waits for the other ranks, which a failure must not
            enable_shrink=most_rows > 0,  # a rank that is gone becomes known by its number, and traps no kernel
        )
        self._masked = torch.zeros(dims.world, dtype=torch.int32, device=device)
        self._numbers = torch.arange(1, dims.world + 1, dtype=torch.int32, device=device)
        self.error = torch.zeros(1, dtype=torch.int32, device=device)

    def ask(self) -> None:
        """Brings `error` up to date, in the order of the stream."""
        if self.most_rows:
            self.buffer.low_latency_query_mask_buffer(self._masked)
            torch.amax(self._masked * self._numbers, 0, keepdim=True, out=self.error)

    def clean(self) -> None:
        """After normal mode: between hosts it shares memory with low latency, which begins with zeros."""
        if self.most_rows and self._several_hosts:
            self.buffer.clean_low_latency_buffer(*self._shape)

    def close(self) -> None:
        """Gives the memory back. Collective."""
        self.buffer.destroy()


def row_unit(ranks: int) -> int:
    """Rows of a rank in low latency are a multiple of this: DeepEP wants fours, and those of all ranks, for which an
    expert has room, are whole blocks of the masked products.
    """
    return math.lcm(4, BLOCK_ROWS // math.gcd(BLOCK_ROWS, ranks))


def machines(dims: ParallelDims) -> list[Machine]:
    """Of every rank, in rank order. Collective; imports the libraries."""
    drivers = [(adapter / "device/driver").resolve().name for adapter in ADAPTERS.glob("*")]
    own = Machine(BOOT_ID.read_text().strip(), "mlx5_core" in drivers, _missing())
    return [Machine(*json.loads(machine)) for machine in dims.exchange(json.dumps(own).encode())]


def refusal(config: ModelConfig, dims: ParallelDims, where: Sequence[Machine], most_rows: int, *, fp8: bool) -> str:
    """Why DeepEP cannot serve these ranks; empty: it can. The same on every rank.

    Args:
        where: from `machines`
        most_rows: as for DeepEpBuffer
        fp8: whether the experts' weights are FP8
    """
    most = MOST_ROWS // row_unit(dims.world) * row_unit(dims.world)
    blocks = [where[first : first + HOST_RANKS] for first in range(0, len(where), HOST_RANKS)]
    found = (
        (dims.tp > 1, f"tp={dims.tp}, and it needs tp=1"),
        (dims.dp not in RANKS, f"dp={dims.dp} is none of {_listed(RANKS)}"),
        (not fp8, "the experts' weights are not FP8"),
        (
            config.hidden_size not in HIDDEN_SIZES,
            f"hidden_size={config.hidden_size} is none of {_listed(HIDDEN_SIZES)}",
        ),
        (
            config.num_experts_per_tok > MOST_CHOICES,
            f"num_experts_per_tok={config.num_experts_per_tok} is more than {MOST_CHOICES}",
        ),
        (most_rows > most, f"decode steps have up to {most_rows} rows, more than {most}: lower max_running"),
        (
            any(len({machine.host for machine in block}) > 1 for block in blocks),
            f"every {HOST_RANKS} consecutive ranks must be on one host",
        ),
        (
            len(where) > HOST_RANKS and not all(machine.rdma for machine in where),
            f"more than {HOST_RANKS} ranks need an RDMA adapter with the driver mlx5 on every host",
        ),
        *((bool(machine.missing), f"rank {rank}: {machine.missing}") for rank, machine in enumerate(where)),
    )
    return next((reason for holds, reason in found if holds), "")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _missing() -> str:
    try:
        _preload()
        for name in LIBRARIES:
            importlib.import_module(name)
    except (ImportError, OSError) as error:
        return f"{error} (pip install 'millrace[gpu]')"
    return ""


def _preload() -> None:
    """What the library of deep_ep links against: the driver, and NVSHMEM of the system or of its wheel."""
    ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
    try:
        ctypes.CDLL(NVSHMEM, ctypes.RTLD_GLOBAL)
    except OSError:
        spec = importlib.util.find_spec("nvidia.nvshmem")
        for folder in (spec and spec.submodule_search_locations) or ():
            ctypes.CDLL(f"{folder}/lib/{NVSHMEM}", ctypes.RTLD_GLOBAL)
