"""What all benches share: a summary of numbers, where and with what they were measured, and the one JSON line at the
end.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PACKAGES = ("millrace", "torch", "grpcio", "nixl", "sgl-deep-gemm", "sgl-flash-mla", "flashinfer-python")


@dataclass(frozen=True, slots=True)
class Summary:
    """Of a list of numbers, in their unit. All NaN for an empty list."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        if not values:
            return cls(math.nan, math.nan, math.nan, math.nan)
        ordered = sorted(values)
        return cls(sum(ordered) / len(ordered), *(percentile(ordered, q) for q in (0.5, 0.9, 0.99)))


def percentile(ordered: Sequence[float], q: float) -> float:
    """Linear between the two nearest ranks. `ordered` ascends and is not empty; q in [0, 1]."""
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def hardware() -> str:
    """For example "8 x NVIDIA H200, 96 cores of Intel(R) Xeon(R) …" or "2 cores of AMD EPYC …"."""
    cores = f"{len(os.sched_getaffinity(0))} cores of {_cpu_name()}"
    gpus = _gpu_names()
    return f"{len(gpus)} x {gpus[0]}, {cores}" if gpus else cores


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu_names() -> list[str]:
    if shutil.which("nvidia-smi") is None:
        return []
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.split("\n")[:-1]


def versions() -> dict[str, str]:
    """Of Python and of those packages that are installed, read from their metadata: nothing is imported."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def command() -> str:
    """What this process was started with."""
    return shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]])


@dataclass(frozen=True, slots=True)
class Record:
    """One run of a bench, complete enough to be repeated and compared."""

    bench: str
    config: Mapping[str, Any]
    results: Mapping[str, Any]
    hardware: str = field(default_factory=hardware)
    versions: Mapping[str, str] = field(default_factory=versions)
    command: str = field(default_factory=command)
    time: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))

    def to_json(self) -> str:
        """One line. NaN becomes null: it is not JSON."""
        return json.dumps(_plain(asdict(self)), allow_nan=False, ensure_ascii=False)


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 9) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, str | int | None):
        return value
    return str(value)


def print_record(record: Record) -> None:
    """The last line of every bench."""
    print(record.to_json(), flush=True)
