"""The numbers of facts.toml: steps that were timed, and settings that were timed on and off.

facts.toml is the one table of measurements. Every number in it names its file below bench/results.
"""

import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from millrace_common.json_values import JsonObject

from millrace_serve.model.config import ModelConfig

FILE = Path(__file__).with_name("facts.toml")
PROC = Path("/proc/driver/nvidia/gpus")  # of NVIDIA's driver
CGROUP = Path("/sys/fs/cgroup")  # of this process's container, version 2
EXPERTS = 32  # of a rank, in every run of the shape ep8
V3 = {  # the widths of all runs
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "kv_lora_rank": 512,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "index_topk": 0,
    "fp8_blocks": True,
}


@dataclass(frozen=True, slots=True)
class TimedStep:
    """A timed step of `rows` sequences of `context` tokens each. ms: of the whole run's `layers`."""

    gpu: str
    shape: str
    kind: str  # decode, prefill
    rows: int
    context: int
    kv: str
    layers: int
    ranks: int  # GPUs that ran it together; 1: nothing was exchanged
    ms: float
    ms_at: str  # where the number stands: FILE:PATH


@dataclass(frozen=True, slots=True)
class Gain:
    """A setting that was timed on and off. gain: how many times faster with it."""

    setting: str
    gpu: str
    shape: str
    case: str
    most: int  # sequences or tokens
    level: int  # drafts, or 1
    gain: float
    at: str

    @classmethod
    def of(cls, row: JsonObject) -> Self:
        facts = {name: row[name] for name in ("setting", "gpu", "shape", "case", "most", "level")}
        if "gain" in row:
            return cls(**facts, gain=row["gain"], at=row["gain_at"])
        rate = row["on_at"].endswith("tokens_per_s")
        return cls(**facts, gain=row["on"] / row["off"] if rate else row["off"] / row["on"], at=row["on_at"])

    @property
    def file(self) -> str:
        return f"{self.at.partition(':')[0]}.json"


@functools.cache
def raw() -> dict[str, list[JsonObject]]:
    """facts.toml as it is: `steps`, `chunks` and `gains`."""
    return tomllib.loads(FILE.read_text())


@functools.cache
def steps() -> tuple[TimedStep, ...]:
    return tuple(TimedStep(**row) for row in raw()["steps"])


def chunk_seconds(shape: str) -> list[float]:
    """Seconds of a layer that a chunk of 64 prompt tokens adds to a decode step: of each run."""
    return [(row["mixed"] - row["decode"]) / row["layers"] / 1e3 for row in raw()["chunks"] if row["shape"] == shape]


def gains_of(setting: str, gpu: str, shape: str = "") -> list[Gain]:
    """On this GPU, else on the first other one. `shape`: of a rank; empty: any."""
    every = map(Gain.of, raw()["gains"])
    found = [gain for gain in every if gain.setting == setting and shape in ("", gain.shape)]
    gpus = {gain.gpu: None for gain in found}
    return [gain for gain in found if gain.gpu == (gpu if gpu in gpus else next(iter(gpus)))]


def shape_of(model: ModelConfig, tp: int, dp: int, *, expert_tp: bool) -> str:
    """What a rank computes, by the names of facts.toml; empty: nobody has timed it."""
    if any(getattr(model, name) != value for name, value in V3.items()):
        return ""
    if tp == 1 and model.n_routed_experts == EXPERTS * dp:
        return "ep8"
    return "tp8" if (tp, dp, expert_tp, model.n_routed_experts) == (8, 1, True, 256) else ""


def gpu_here(proc: Path = PROC) -> str:
    """The kind of this host's first GPU, for example "H200"; empty: the driver does not say, or nobody has timed it."""
    lines = [line for file in sorted(proc.glob("*/information")) for line in file.read_text().splitlines()]
    words = [word for line in lines if line.startswith("Model:") for word in line.split()]
    return next((word for word in words if word in {step.gpu for step in steps()}), "")


def memory_limit(cgroup: Path = CGROUP) -> int:
    """Bytes that this process's container may take; 0: there is no container, or it has no limit."""
    try:
        return int((cgroup / "memory.max").read_text())
    except (OSError, ValueError):  # the file says "max"
        return 0
