"""Times tiles of the kernels that move rows around the products of an EP8 rank, for its decode steps and its prefill;
prints the best beside the one in use, and all times as a JSON line. What wins belongs into the defaults of the kernels
in millrace_kernels/triton (`quant.config`, `rms_norm.tile`, `moe_rows`, `mla_expand`, `rope`).

python -m millrace_bench.kernels.tune_rows [--tokens 128 16384] [--only permute silu_mul_quant] [--out FILE]
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from millrace_kernels.fp8 import quant_groups
from millrace_kernels.lib.deep_gemm_grouped import tile_rows
from millrace_kernels.moe_experts import expected_rows
from millrace_kernels.triton import mla_expand, quant, rms_norm, rope
from millrace_kernels.triton.moe_route import route, slices
from millrace_kernels.triton.moe_rows import combine_tile, combine_with, permute, silu_mul_quant

from millrace_bench.kernels.moe import EP8_STEP, Rank
from millrace_bench.kernels.tuning import Run, parser, times_of

CUDA = torch.device("cuda")
TOKENS = (128, 256, 16384)
HEADS, NOPE, ROPE = 128, 128, 64
Options = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Task:
    op: str
    run: Callable[..., object] = field(repr=False)  # with an option's numbers
    used: tuple[int, ...]
    others: Options = field(repr=False)


def tasks(num: int, rank: Rank = EP8_STEP) -> Iterator[Task]:
    hidden = rank.dims.hidden
    x, gain = (torch.randn(rows, hidden, device=CUDA).bfloat16() for rows in (num, 1))
    tiles = [(8, 4), (8, 8), (16, 8), (32, 8), (64, 8), (64, 16)]
    for plain in (True, False):
        norm = functools.partial(rms_norm.add_rms_norm_quant_with, x, x.clone(), gain[0], 1e-6, plain)
        yield Task(f"add_rms_norm_quant plain={plain}", norm, rms_norm.tile(num, hidden), tiles)
    heads = torch.randn(num, HEADS * NOPE, device=CUDA).bfloat16()
    rows_warps = [(4, 1), (8, 2), (16, 2), (16, 4), (32, 4), (32, 8)]
    yield Task("quant_groups", functools.partial(quant.quant_groups_with, heads), quant.config(num), rows_warps)
    up, k_pe = heads.new_zeros(num, HEADS, 2 * NOPE), heads.new_zeros(num, ROPE)
    expand = functools.partial(mla_expand.expand_kv, up, k_pe, NOPE)
    yield Task("expand_kv", expand, (64, 4), [*itertools.product((16, 32, 64), (2, 4, 8))])
    q = up.new_zeros(num, HEADS, NOPE + ROPE)[..., NOPE:]
    rotate = functools.partial(rope.rotate_into_with, q, q, *torch.zeros(2, num, ROPE // 2, device=CUDA))
    yield Task("rope_q", rotate, rope.MANY, [*itertools.product((16, 32, 64, 128), (8, 16))])
    yield from _experts(num, rank)


def _experts(num: int, rank: Rank) -> Iterator[Task]:
    """Of one pass: of so many tokens as one holds."""
    generator = torch.Generator(device=CUDA).manual_seed(num)
    num = slices(num, rank.dims.top_k + rank.shared)[0][1]
    weights, experts = rank.choose(num, CUDA, generator, 0.0)
    alignment = tile_rows(expected_rows(num, rank.dims.top_k, rank.experts))
    plan, _ = route(experts, rank.held, rank.shared, alignment)
    x = quant_groups(torch.randn(num, rank.dims.hidden, device=CUDA).bfloat16())
    permuted = torch.empty(plan.num_rows, rank.dims.hidden, dtype=torch.float8_e4m3fn, device=CUDA)
    ways = [*itertools.product((1, 2, 4, 8), (False, True))]
    yield Task("permute", functools.partial(permute, x, plan, permuted), (4, False), ways)
    gate_up = torch.zeros(plan.num_rows, 2 * rank.size, dtype=torch.bfloat16, device=CUDA)
    rows_warps = ((8, 2), (8, 4), (16, 4), (16, 8), (32, 8))
    tiles = [(rows, programs, warps) for rows, warps in rows_warps for programs in (132 * 8, 132 * 16)]
    yield Task("silu_mul_quant", functools.partial(silu_mul_quant, gate_up, plan), (16, 132 * 8, 4), tiles)
    y = torch.zeros(plan.num_rows, rank.dims.hidden, dtype=torch.bfloat16, device=CUDA)
    out = torch.empty(num, rank.dims.hidden, dtype=torch.bfloat16, device=CUDA)
    widths = [*itertools.product((256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8))]
    yield Task("combine", functools.partial(combine_with, y, plan, weights, out), combine_tile(num), widths)


def tune(task: Task) -> dict[tuple[int, ...], float]:
    options = dict.fromkeys((task.used, *task.others))
    return times_of(task.op, options, lambda option: [functools.partial(task.run, *option)], CUDA)


def report(num: int, task: Task) -> dict[str, Any]:
    times = tune(task)
    best = next(iter(times))
    used = f"in use {task.used}: {times.get(task.used, float('nan')):.1f} us"
    print(f"{task.op} T={num}: {times[best]:.1f} us with {best}; {used}", flush=True)
    ranked = [[list(option), round(us, 2)] for option, us in times.items()]
    return {"op": task.op, "tokens": num, "used": list(task.used), "us": ranked}


def main() -> None:
    options = parser("Tune the kernels around an EP8 rank's products.", 180.0)
    options.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    options.add_argument("--only", nargs="+", help="the ops' names")
    args = options.parse_args()
    found = ((num, task) for num in args.tokens for task in tasks(num))
    wanted = ((num, task) for num, task in found if not args.only or task.op.split()[0] in args.only)
    Run("tune_rows", args).measure(wanted, lambda job: report(*job))


if __name__ == "__main__":
    main()
