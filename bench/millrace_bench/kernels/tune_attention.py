"""Attention's own kernels at V3's shapes. The absorbed form's products of many tokens have tables; what wins elsewhere
belongs into `config` of the kernel's module in millrace_kernels/triton.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from millrace_kernels.backend import forced
from millrace_kernels.fp8 import Fp8, Operand
from millrace_kernels.mla_absorb import project_v_quant
from millrace_kernels.testing import attention_inputs
from millrace_kernels.testing.attention_inputs import Draw, Inputs
from millrace_kernels.triton import mla_absorb, mla_decode, mla_prefill
from millrace_kernels.triton.mla_absorb import Tile
from millrace_kernels.tuned import Key
from torch import Tensor

from millrace_bench.kernels.tuned_file import Entry
from millrace_bench.kernels.tuning import GAIN, Clock, Found, times_of

HEADS, SETS = (16, 128), 16  # as many inputs take turns, so that weights come from memory
SAMPLES = 7
TABLES = {"absorb_q of many": "absorb_q", "project_v_quant": "project_v_quant"}


@dataclass(frozen=True, slots=True)
class Task:
    op: str
    shape: str
    make: Callable[[], Inputs]
    run: Callable[..., object]  # with the inputs and one of the configurations
    options: list[dict[str, Any]]  # the one in use is the first
    draw: Draw
    key: Key = ()  # of the table, without the bytes of an element
    index: int = 0  # of the job

    def __str__(self) -> str:
        return f"{self.op:20}{self.shape:24}"

    def tasks(self) -> Iterator[tuple[Hashable, Callable[[], None]]]:
        """Which compile at the first shape that has them."""
        for number, option in enumerate(self.options):
            yield (self.op, str(option)), functools.partial(compile_one, self.index, number)

    def measure(self, ready: set[Hashable], clock: Clock) -> Found | None:
        times = tune(self, ready, clock)
        return report(self, times) if times else None


def tasks(draw: Draw) -> Iterator[Task]:
    for heads, num in itertools.product(reversed(HEADS), (128, 256)):
        yield from _absorption_of_many(draw, num, heads)
    for heads in HEADS:
        for num in (1, 16):
            yield _absorption(draw, num, heads)
        for batch, keys in ((1, 1024), (1, 4096), (4, 4096), (32, 4096), (128, 4096)):
            yield _decode(draw, heads, batch, keys)
        for num in (64, 4096):
            yield _prefill(draw, heads, num)


def _absorption(draw: Draw, num: int, heads: int) -> Task:
    shape = f"T={num} H={heads}"
    widths = (mla_absorb.LEAST_COLUMNS, 64, 128, 256, attention_inputs.LATENT)
    options = [{"tile": Tile(width, warps)} for width in widths for warps in (2, 4, 8)]
    used = {"tile": Tile(mla_absorb.columns(heads, attention_inputs.LATENT))}
    options.sort(key=lambda option: option != used)
    make = functools.partial(attention_inputs.absorb_q, draw, num, heads)
    return Task("absorb_q", shape, make, mla_absorb.absorb_q_with, options, draw)


def _absorption_of_many(draw: Draw, num: int, heads: int) -> Iterator[Task]:
    """Our products, with BF16 and with FP8 weights, against cuBLAS (no tile) and the launch that they spare."""
    shape = f"T={num} H={heads}"
    tiles = [Tile(*tile) for tile in itertools.product((64, 128), (4, 8), (32, 64, 128))]
    for op, run, make, weight in (
        ("absorb_q of many", _absorb_many, attention_inputs.absorb_q, "w_uk"),
        ("project_v_quant", _project_many, attention_inputs.project_v, "w_uv"),
    ):
        chosen = [tile for tile in tiles if op == "absorb_q of many" or tile.columns == attention_inputs.VALUE]
        options: list[dict[str, Any]] = [{"tile": None, "fp8": False}]
        options += [{"tile": t, "fp8": fp8} for t in chosen for fp8 in (False, True)]
        of_inputs = functools.partial(_with_fp8, make, weight, draw, num, heads)
        yield Task(op, shape, of_inputs, run, options, draw, (num, heads))


def _with_fp8(make: Callable[..., Inputs], weight: str, *shape: Any) -> Inputs:
    inputs = make(*shape)
    return inputs | {"quantised": attention_inputs.fp8_heads(inputs[weight])}


def _absorb_many(
    q: Tensor, w_uk: Tensor, quantised: Fp8, cos: Tensor, sin: Tensor, tile: Tile | None, fp8: bool
) -> Tensor:
    if tile is None:
        return mla_absorb.absorb_q(q, w_uk, cos, sin)
    return mla_absorb.absorb_q_with(q, quantised if fp8 else w_uk, cos, sin, tile)


def _project_many(latent: Tensor, w_uv: Tensor, quantised: Fp8, tile: Tile | None, fp8: bool) -> Operand:
    if tile is None:
        with forced(**{"mla_absorb.project_v_quant": ""}):
            return project_v_quant(latent, w_uv)
    return mla_absorb.project_v_quant_with(latent, quantised if fp8 else w_uv, tile)


def _decode(draw: Draw, heads: int, batch: int, keys: int) -> Task:
    used = mla_decode.config(heads, draw.dtype)
    widths, programs = ((16, 32, 64), (32, 64, 132, 264)) if batch <= 4 else ((32, 64), (132, 264, 528))
    others = itertools.product((16, 32, 64), widths, programs, (4, 8), (2, 3))
    options = dict.fromkeys(
        (used, *(mla_decode.MlaDecodeConfig(*other) for other in others if other[0] <= max(heads, 16)))
    )
    make = functools.partial(attention_inputs.mla_decode, draw, (keys,) * batch, 1, heads, draw.dtype)
    chosen = [{"chosen": option} for option in options]
    return Task("mla_decode", f"H={heads} B={batch} L={keys}", make, mla_decode.mla_decode, chosen, draw)


def _prefill(draw: Draw, heads: int, num: int) -> Task:
    used = mla_prefill.config(num, draw.dtype)
    others = itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))
    options = dict.fromkeys((used, *(mla_prefill.MlaPrefillConfig(*other) for other in others)))
    make = functools.partial(attention_inputs.mla_prefill, draw, (num,), (num,), heads, True, padding=0)
    chosen = [{"chosen": option} for option in options]
    return Task("mla_prefill", f"T={num} H={heads}", make, mla_prefill.mla_prefill, chosen, draw)


def compile_one(index: int, option: int) -> None:
    task = jobs()[index]
    task.run(**task.make(), **task.options[option])


def tune(task: Task, ready: set[Hashable], clock: Clock) -> dict[str, float]:
    sets = [task.make() for _ in range(SETS if task.op.startswith(("absorb_q", "project_v")) else 1)]
    options = {str(option): option for option in task.options if (task.op, str(option)) in ready}

    def calls(name: str) -> list[Callable[[], object]]:
        return [functools.partial(task.run, **inputs, **options[name]) for inputs in sets]

    device = task.draw.device
    return times_of(task, options, calls, device, samples=SAMPLES, is_over=lambda: clock.is_over)


def report(task: Task, times: dict[str, float]) -> Found:
    best, used = next(iter(times)), str(task.options[0])
    in_use = times.get(used, math.nan)
    print(f"{task}{times[best]:10.1f} us with {best}, {in_use:.1f} with {used}", flush=True)
    us = [[name, round(us, 2)] for name, us in times.items()]
    row = {"op": task.op, "shape": task.shape, "used": used, "us": us}
    return Found(row, tuple(entries(task, times)) if task.key else ())


def entries(task: Task, times: dict[str, float]) -> Iterator[Entry]:
    """For BF16 and for FP8 weights the fastest tile, where it is faster than cuBLAS, the first option."""
    cublas = times.get(str(task.options[0]), math.inf)
    for size in (1, 2):
        tiles = [o for o in task.options[1:] if o["fp8"] == (size == 1) and str(o) in times]
        if tiles:
            best = min(tiles, key=lambda option: times[str(option)])
            us, others = times[str(best)], {"cublas": cublas} if cublas < math.inf else {}
            chosen = best["tile"] if us < GAIN * cublas else None
            yield Entry(TABLES[task.op], (*task.key, size), chosen, us, others)


def jobs() -> list[Task]:
    found = tasks(Draw("cuda", torch.bfloat16))
    return [replace(task, index=index) for index, task in enumerate(found)]
