"""Programmatic dependent launch: a kernel is set up on the GPU while the one before it in the stream still runs.

A kernel launched this way calls `wait()` before it reads what an earlier kernel wrote and before it writes; until then
it may only read weights. `wait()` ends when all of the kernel before has ended. That one waited too, so whatever came
earlier has ended as well; hence every kernel waits, and `go_ahead()`, which lets the next be set up, comes after that.
Who never calls it goes ahead by ending; who is launched plainly (cuBLAS, PyTorch) begins when all before it has ended.
Off by default; switched before any capture.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra import cuda

_dependent = False


def set_dependent(on: bool) -> None:
    global _dependent
    _dependent = on


def options(num_warps: int, num_stages: int = 2) -> dict[str, int | bool]:
    """Launch options of every kernel here, PDL among them: a constexpr that the kernels hand to wait and go_ahead."""
    pdl = {"launch_pdl": True} if _dependent else {}
    return {"num_warps": num_warps, "num_stages": num_stages, "PDL": _dependent, **pdl}


@triton.jit
def wait(PDL: tl.constexpr):
    if PDL:
        cuda.gdc_wait()


@triton.jit
def go_ahead(PDL: tl.constexpr):
    if PDL:
        cuda.gdc_launch_dependents()
