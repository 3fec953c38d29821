"""What all benches share: a summary of numbers, where and with what they were measured, and the one JSON line at the
end.
"""

import contextlib
import importlib.metadata
import json
import math
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]  # of the source tree
# What a record says of a GPU: MHz, W; None where the driver does not tell. The values are names of nvidia-smi.
GPU = {
    "index": "index",
    "name": "name",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "power_limit_w": "power.limit",
    "power_w": "power.draw",
}
SMI = ("nvidia-smi", f"--query-gpu={','.join(GPU.values())}", "--format=csv,noheader,nounits")
Gpu = dict[str, Any]
Row = dict[str, Any]  # of the results of a bench
PACKAGES = ("millrace", "torch", "grpcio", "nixl", "sgl-deep-gemm", "sgl-flash-mla", "flashinfer-python")


@dataclass(frozen=True, slots=True)
class Summary:
    """Of a list of numbers, in their unit. All NaN for an empty list."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Summary":
        if not values:
            return cls(*[math.nan] * 5)
        ordered = sorted(values)
        return cls(sum(ordered) / len(ordered), *(percentile(ordered, q) for q in (0.5, 0.9, 0.95, 0.99)))

    @property
    def milliseconds(self) -> dict[str, float]:
        """Of seconds."""
        return {name: value * 1e3 for name, value in asdict(self).items()}

    @property
    def inverse(self) -> "Summary":
        """Of times above 0: as rates. The mean is the harmonic one, and a percentile is what so many reach."""
        return Summary(*(1 / value if value else math.inf for value in asdict(self).values()))


def percentile(ordered: Sequence[float], q: float) -> float:
    """Linear between the two nearest ranks. `ordered` ascends and is not empty; q in [0, 1]."""
    position = q * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])


def hardware() -> str:
    """For example "8 x NVIDIA H200, 96 cores of Intel(R) Xeon(R) …" or "2 cores of AMD EPYC …"."""
    cores = f"{len(os.sched_getaffinity(0))} cores of {_cpu_name()}"
    names = [gpu["name"] for gpu in gpus()]
    return f"{len(names)} x {names[0]}, {cores}" if names else cores


def _cpu_name() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def gpus() -> list[Gpu]:
    """Those that this process may use, as they are now; none without a driver."""
    if shutil.which(SMI[0]) is None:
        return []
    found = subprocess.run(SMI, capture_output=True, text=True, timeout=30, check=False).stdout
    return _shown(_gpu(line) for line in found.splitlines() if line)


@contextlib.contextmanager
def busiest_gpus() -> Iterator[list[Gpu]]:
    """The list that it gives is filled at the end: each GPU as it was while it drew the most power, read twice per
    second. A clock read after the work is that of an idle GPU, higher than under load.
    """
    found: list[Gpu] = []
    if shutil.which(SMI[0]) is None:
        yield found
        return
    with tempfile.TemporaryFile("w+") as file:
        process = subprocess.Popen([*SMI, "--loop-ms=500"], stdout=file)
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
            file.seek(0)
            whole = (line for line in file if line.endswith("\n") and line.count(",") == len(GPU) - 1)
            by_power = sorted(_shown(map(_gpu, whole)), key=lambda gpu: gpu["power_w"] or 0.0)
            found += {gpu["index"]: gpu for gpu in by_power}.values()  # the last one of an index stays
            found.sort(key=lambda gpu: gpu["index"])


def _shown(found: Iterable[Gpu]) -> list[Gpu]:
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [gpu for gpu in found if not shown or str(gpu["index"]) in shown.split(",")]


def _gpu(line: str) -> Gpu:
    """Of a line of nvidia-smi."""
    index, name, *numbers = (text.strip() for text in line.split(","))
    measured = {key: _number(text) for key, text in zip(list(GPU)[2:], numbers, strict=True)}
    return {"index": int(index), "name": name, **measured}


def _number(text: str) -> float | None:
    """None for what a driver does not tell: "[N/A]"."""
    with contextlib.suppress(ValueError):
        return float(text)
    return None


def versions() -> dict[str, str]:
    """Of Python and of those packages that are installed, read from their metadata: nothing is imported. Also the
    commit: MILLRACE_COMMIT, or that of a git checkout, with "-dirty" after it when files differ from it.
    """
    found = {"python": platform.python_version()}
    if commit := os.environ.get("MILLRACE_COMMIT"):
        found["commit"] = commit
    elif (ROOT / ".git").exists() and shutil.which("git"):
        describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        found["commit"] = subprocess.run(describe, capture_output=True, text=True, check=False).stdout.strip()
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
    gpus: Sequence[Gpu] = field(default_factory=gpus)
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
    if isinstance(value, int | None):
        return value
    return str(value).replace(f"{ROOT}{os.sep}", "")  # no record names a folder of one machine


def print_row(*names: str, **figures: Any) -> Row:
    """A line for who looks on; the JSON has all digits. Returns the figures."""
    print("  ".join((*names, *(f"{key} {_short(value)}" for key, value in figures.items()))), flush=True)
    return figures


def printed(rows: Iterable[Row]) -> list[Row]:
    """All of them, each printed when it comes."""
    return [print_row(**row) for row in rows]


def _short(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"({', '.join(f'{key} {_short(one)}' for key, one in value.items())})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def print_record(record: Record) -> None:
    """The last line of every bench. A record may be older than its results, so the GPUs are read again."""
    print(replace(record, gpus=gpus()).to_json(), flush=True)
