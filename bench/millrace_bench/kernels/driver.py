"""Runs cases and turns times into figures."""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass

import torch
from millrace_kernels.testing.tolerances import rms_error
from torch import Tensor

from millrace_bench.kernels.case import Case
from millrace_bench.kernels.timing import Call, time_us

# An H200 by its datasheet, dense.
BYTES_PER_S = 4.8e12
FLOPS_PER_S = {"fp8": 1979e12, "bf16": 989.5e12}
COLD_BYTES = 160e6  # of inputs between two uses of the same: 2.6 L2 caches
MAX_SETS = 48


@dataclass(frozen=True, slots=True)
class Row:
    op: str
    shape: str
    impl: str
    us: float  # NaN: it failed
    gb_per_s: float = math.nan
    tflops: float = math.nan
    roofline: float = math.nan  # the time that an H200 needs at least, as a part of the time taken; NaN on a CPU
    anchor_us: float | None = None
    anchor: str = ""
    error: str = ""
    rms: float | None = None  # error beside the case's exact implementation, where results have one shape


def floor_us(case: Case) -> float:
    return max(case.nbytes / BYTES_PER_S, case.flops / FLOPS_PER_S[case.math]) * 1e6


def num_sets(case: Case, device: torch.device, quick: bool) -> int:
    """How many input sets take turns, so that a call finds none of its bytes in the L2 cache. Ops that move little
    find them there in a model too.
    """
    if quick or device.type != "cuda":
        return 1
    return max(1, min(MAX_SETS, math.ceil(COLD_BYTES / max(case.nbytes, 1))))


def measure(case: Case, device: torch.device, quick: bool = False) -> Iterator[Row]:
    """One row per implementation; one that raises is a row with its error, as are inputs that do not fit."""
    try:
        sets = [case.make() for _ in range(num_sets(case, device, quick))]
    except Exception as error:
        yield Row(case.op, case.shape, "inputs", math.nan, error=_told(error))
        return
    exact = sets[0][case.exact]() if case.exact else None
    for impl in sets[0]:
        yield _row(case, impl, [calls[impl] for calls in sets], device, samples=3 if quick else 7, exact=exact)


def _row(case: Case, impl: str, calls: list[Call], device: torch.device, samples: int, exact: object) -> Row:
    common = {"op": case.op, "shape": case.shape, "impl": impl, "anchor_us": case.anchor_us, "anchor": case.anchor}
    try:
        found = calls[0]() if exact is not None else None
        us = time_us(calls, device, samples)
    except Exception as error:  # of a library, of any kind; the other implementations are still worth a row
        return Row(**common, us=math.nan, error=_told(error))  # type: ignore[arg-type]
    roofline = floor_us(case) / us if device.type == "cuda" else math.nan
    figures: dict[str, float] = {"gb_per_s": case.nbytes / us / 1e3, "tflops": case.flops / us / 1e6}
    figures["roofline"] = roofline
    if isinstance(found, Tensor) and isinstance(exact, Tensor) and found.shape == exact.shape:
        figures["rms"] = rms_error(found, exact)
    return Row(**common, us=us, **figures)  # type: ignore[arg-type]


def _told(error: Exception) -> str:
    """That of a build is pages of output around the compiler's line."""
    lines = [line.strip() for line in str(error).splitlines() if "error:" in line]
    return f"{type(error).__name__}: {lines[0] if lines else error}"[:300]


HEADER = f"{'op':30}{'shape':34}{'implementation':26}{'us':>10}{'GB/s':>8}{'TFLOPS':>9}{'roof':>6}{'anchor':>9}"


def line(row: Row) -> str:
    head = f"{row.op:30}{row.shape:34}{row.impl:26}"
    if row.error:
        return f"{head}  {row.error.splitlines()[0]}"
    roof = "" if math.isnan(row.roofline) else f"{row.roofline:.0%}"
    anchor = "" if row.anchor_us is None else f"{row.anchor_us:.1f}"
    rms = "" if row.rms is None else f"   rms {row.rms:.1e}"
    return f"{head}{row.us:10.1f}{row.gb_per_s:8.0f}{row.tflops:9.2f}{roof:>6}{anchor:>9}{rms}"


def as_dict(row: Row) -> dict[str, object]:
    """Without what is empty, rounded."""
    found = {key: value for key, value in asdict(row).items() if value not in (None, "")}
    return {key: float(f"{value:.4g}") if isinstance(value, float) else value for key, value in found.items()}
