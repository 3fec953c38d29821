"""Times the configurations of attention's own kernels at V3's shapes; prints the best beside the one in use, and all
times as a JSON line. What wins belongs into `config` of the kernel's module in millrace_kernels/triton.

python -m millrace_bench.kernels.tune_attention [--op mla_decode] [--quick] [--seconds 180] [--out FILE]
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from millrace_kernels.backend import forced
from millrace_kernels.fp8 import Fp8, Operand
from millrace_kernels.mla_absorb import project_v_quant
from millrace_kernels.triton import mla_absorb, mla_decode, mla_prefill
from millrace_kernels.triton.mla_absorb import Tile
from torch import Tensor

from millrace_bench.kernels import attention_inputs
from millrace_bench.kernels.attention_inputs import Draw, Inputs
from millrace_bench.kernels.tuning import Run, parser, times_of

HEADS, SETS = (16, 128), 16  # as many inputs take turns, so that weights come from memory
COMPILE_PART = 0.5  # of the time, at most


@dataclass(frozen=True, slots=True)
class Task:
    op: str
    shape: str
    make: Callable[[], Inputs]
    run: Callable[..., object]  # with the inputs and one of the configurations
    options: list[dict[str, Any]]  # the one in use is the first

    def __str__(self) -> str:
        return f"{self.op:20}{self.shape:24}"


def tasks(draw: Draw) -> Iterator[Task]:
    for heads, num in itertools.product(reversed(HEADS), (128, 256)):
        yield from _absorption_of_many(draw, num, heads)
    for heads in HEADS:
        for num in (1, 16):
            yield from _absorption(draw, num, heads)
        for batch, keys in ((1, 1024), (1, 4096), (4, 4096), (32, 4096), (128, 4096)):
            yield _decode(draw, heads, batch, keys)
        for num in (64, 4096):
            yield _prefill(draw, heads, num)


def _absorption(draw: Draw, num: int, heads: int) -> Iterator[Task]:
    shape = f"T={num} H={heads}"
    for op, run, make, width, least in (
        ("absorb_q", mla_absorb.absorb_q_with, attention_inputs.absorb_q, attention_inputs.LATENT, 32),
        ("project_v", mla_absorb.project_v_with, attention_inputs.project_v, attention_inputs.VALUE, 16),
    ):
        blocks = [1 << power for power in range(least.bit_length() - 1, width.bit_length())]
        used = mla_absorb.columns(heads, width, least)
        options = [{"tile": Tile(block, warps)} for block in blocks for warps in (2, 4, 8)]
        options.sort(key=lambda option: option != {"tile": Tile(used)})
        yield Task(op, shape, functools.partial(make, draw, num, heads), run, options)


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
        yield Task(op, shape, functools.partial(_with_fp8, make, weight, draw, num, heads), run, options)


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
        with forced(**{"mla_absorb.project_v_quant": "", "mla_absorb.project_v": ""}):
            return project_v_quant(latent, w_uv)
    return mla_absorb.project_v_quant_with(latent, quantised if fp8 else w_uv, tile)


def _decode(draw: Draw, heads: int, batch: int, keys: int) -> Task:
    used = mla_decode.config(heads, draw.dtype)
    widths, programs = ((16, 32, 64), (32, 64, 132, 264)) if batch <= 4 else ((32, 64), (132, 264, 528))
    others = itertools.product((16, 32, 64), widths, programs, (4, 8), (2, 3))
    options = dict.fromkeys((used, *(mla_decode.Config(*other) for other in others if other[0] <= max(heads, 16))))
    make = functools.partial(attention_inputs.mla_decode, draw, (keys,) * batch, 1, heads, draw.dtype)
    chosen = [{"chosen": option} for option in options]
    return Task("mla_decode", f"H={heads} B={batch} L={keys}", make, mla_decode.mla_decode, chosen)


def _prefill(draw: Draw, heads: int, num: int) -> Task:
    used = mla_prefill.config(num, draw.dtype)
    others = itertools.product((64, 128), (32, 64, 128), (4, 8), (2, 3))
    options = dict.fromkeys((used, *(mla_prefill.Config(*other) for other in others)))
    make = functools.partial(attention_inputs.mla_prefill, draw, (num,), (num,), heads, True, padding=0)
    chosen = [{"chosen": option} for option in options]
    return Task("mla_prefill", f"T={num} H={heads}", make, mla_prefill.mla_prefill, chosen)


def compile_one(op: str, task: int, option: int) -> None:
    chosen = _found(op)[task]
    chosen.run(**chosen.make(), **chosen.options[option])


def _found(op: str) -> list[Task]:
    return [task for task in tasks(Draw("cuda", torch.bfloat16)) if op in task.op]


def compiled(op: str) -> Iterator[tuple[Hashable, Callable[[], None]]]:
    """(op, option), which compile at the first shape that has them."""
    for index, task in enumerate(_found(op)):
        for number, option in enumerate(task.options):
            yield (task.op, str(option)), functools.partial(compile_one, op, index, number)


def tune(task: Task, ready: set[Hashable], device: torch.device, samples: int) -> dict[str, float]:
    sets = [task.make() for _ in range(SETS if task.op.startswith(("absorb_q", "project_v")) else 1)]
    options = {str(option): option for option in task.options if (task.op, str(option)) in ready}

    def calls(name: str) -> list[Callable[[], object]]:
        return [functools.partial(task.run, **inputs, **options[name]) for inputs in sets]

    return times_of(task, options, calls, device, samples=samples)


def report(task: Task, times: dict[str, float]) -> dict[str, Any] | None:
    if not times:
        return None
    best, used = next(iter(times)), str(task.options[0])
    in_use = times.get(used, float("nan"))
    print(f"{task}{times[best]:10.1f} us with {best}, {in_use:.1f} with {used}", flush=True)
    return {
        "op": task.op,
        "shape": task.shape,
        "used": used,
        "us": [[name, round(us, 2)] for name, us in times.items()],
    }


def main() -> None:
    options = parser("Tune attention's own kernels.", 180.0)
    options.add_argument("--op", default="", help="only ops whose name contains this")
    options.add_argument("--quick", action="store_true", help="fewer samples")
    args, device = options.parse_args(), torch.device("cuda")
    run = Run("tune_attention", args)
    ready, samples = run.compile(compiled(args.op), COMPILE_PART), 3 if args.quick else 7
    run.measure(_found(args.op), lambda task: report(task, tune(task, ready, device, samples)))


if __name__ == "__main__":
    main()
