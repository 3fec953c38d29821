"""The division of a CUDA device's memory: planned before the large allocations, logged as a table, refused with
numbers.

    budget   = memory_fraction * total          what this rank may use of the device
    KV pages = budget - weights - activations - graphs - libraries

The needs are estimated before the weights are loaded, and measured after (docs/explanation/gpu.md, "Memory").
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from millrace_common.config import OverCommitted

from millrace_serve.engine.config import GIB, Limits
from millrace_serve.plan.facts import CGROUP, memory_limit

MIB = 1 << 20
GRAPH_BYTES = 12 * MIB  # of a captured graph, besides the scratch memory that all share
CONTEXT_BYTES = 1 * GIB  # of CUDA, cuBLAS, NCCL and loaded kernels, before they are measured
MOST_LIBRARY_BYTES = 4 * GIB  # more than that has been taken by another process that starts at the same time


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of a device, before anything of this rank was allocated."""

    total: int
    free: int


class Demand(NamedTuple):
    """Bytes that a rank needs besides its KV pages."""

    weights: int
    activations: int  # the largest step, sampling included
    graphs: int
    libraries: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    memory: Memory
    fraction: float
    demand: Demand
    page_bytes: int
    page_tokens: int
    num_pages: int

    @property
    def budget(self) -> int:
        return int(self.memory.total * self.fraction)

    def table(self) -> str:
        """One line per use, GiB."""
        kv = self.num_pages * self.page_bytes
        tokens = (self.num_pages - 1) * self.page_tokens
        rows = [
            ("device", self.memory.total, f"{(self.memory.total - self.memory.free) / GIB:.2f} used by others"),
            ("budget", self.budget, f"memory_fraction={self.fraction}"),
            *_uses(self.demand),
            ("KV pages", kv, f"{self.num_pages} of {self.page_bytes / MIB:.2f} MiB, {tokens} tokens"),
            ("left", self.budget - sum(self.demand) - kv, ""),
        ]
        return "\n".join(f"{name:<12}{size / GIB:9.2f} GiB  {note}".rstrip() for name, size, note in rows)


def make_plan(
    limits: Limits, memory: Memory, fraction: float, demand: Demand, page_bytes: int, max_pages: int | None = None
) -> MemoryPlan:
    """Args: limits: num_pages may be "auto": as many as fit. max_pages: the most pages that can ever be used; None: no
    limit. Raises: OverCommitted
    """
    budget, total = int(memory.total * fraction), memory.total
    if budget > memory.free:
        raise OverCommitted(
            f"memory_fraction={fraction} of {_gib(total)} is {_gib(budget)}, but only {_gib(memory.free)} are free: "
            f"others use {_gib(total - memory.free)}. Stop them, or set memory_fraction to "
            f"{int(memory.free / total * 100) / 100}"
        )
    left, needs = budget - sum(demand), ", ".join(f"{name} {_gib(size)}" for name, size, _ in _uses(demand))
    least = limits.max_pages_per_seq + 1 if limits.num_pages == "auto" else limits.num_pages
    if least * page_bytes > left:
        wanted = (
            f"one sequence of max_model_len={limits.max_model_len} tokens needs {least} KV pages"
            if limits.num_pages == "auto"
            else f"limits.num_pages={least} was asked for"
        )
        raise OverCommitted(
            f"{wanted}, {_gib(least * page_bytes)}, but {_gib(max(left, 0))} are left of the budget of {_gib(budget)} "
            f"(memory_fraction={fraction} of {_gib(total)}) after {needs}. {_advice(limits, left, page_bytes)}"
        )
    fit = left // page_bytes
    if limits.num_pages != "auto":
        fit = limits.num_pages
    elif max_pages is not None:
        fit = min(fit, max_pages)
    return MemoryPlan(memory, fraction, demand, page_bytes, limits.page_size, fit)


def check_pages(num_pages: int, page_bytes: int, available: int) -> None:
    """Of a pool in the host's memory, of which bytes are available. Raises: OverCommitted"""
    if (wanted := num_pages * page_bytes) > available:
        raise OverCommitted(
            f"limits.num_pages={num_pages} takes {_gib(wanted)}, but only {_gib(available)} of the host's memory are "
            f"available. Set it to {available // page_bytes} or less"
        )


def host_memory(proc: Path = Path("/proc"), cgroup: Path = CGROUP) -> int:
    """Bytes that this process may still take: what the machine has left, and the limit of its container."""
    machine = _fields(proc / "meminfo")["MemAvailable:"] * 1024
    if not (limit := memory_limit(cgroup)):
        return machine
    used = int((cgroup / "memory.current").read_text()) - _fields(cgroup / "memory.stat")["inactive_file"]
    return min(machine, limit - used)


def _fields(path: Path) -> dict[str, int]:
    """Of a file with one name and number a line."""
    lines = (line.split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in lines}


def graph_reserve(num_graphs: int, shared_bytes: int) -> int:
    """`shared_bytes`: activations of the largest captured step, whose memory the others share."""
    return num_graphs * GRAPH_BYTES + shared_bytes


def _uses(demand: Demand) -> list[tuple[str, int, str]]:
    return [
        ("weights", demand.weights, ""),
        ("activations", demand.activations, "the largest step"),
        ("graphs", demand.graphs, ""),
        ("libraries", demand.libraries, "CUDA, NCCL, workspaces"),
    ]


def _advice(limits: Limits, left: int, page_bytes: int) -> str:
    pages = left // page_bytes
    tokens = (pages - 1) * limits.page_size
    others = "raise memory_fraction, lower limits.max_prefill_tokens, use kv_dtype=float8_e4m3fn or more ranks"
    if tokens < limits.page_size:
        return f"To fit, {others}"
    if limits.num_pages == "auto":
        return f"Set limits.max_model_len to {tokens} or less, or {others}"
    return f"Set limits.num_pages to {pages} or less, or {others}"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"
