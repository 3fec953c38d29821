"""Tiles of the kernels that move rows around the products of an EP8 rank, for its decode steps and its prefill. What
wins belongs into the defaults of the kernels in millrace_kernels/triton (`quant.config`, `rms_norm.tile`, `moe_rows`,
`mla_expand`, `rope`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from millrace_kernels.fp8 import quant_groups
from millrace_kernels.gpu import sms
from millrace_kernels.lib.deep_gemm_grouped import tile_rows
from millrace_kernels.moe_experts import expected_rows
from millrace_kernels.triton import mla_expand, quant, rms_norm, rope
from millrace_kernels.triton.moe_route import route, slices
from millrace_kernels.triton.moe_rows import combine, combine_tile, permute, silu_mul_quant

from millrace_bench.kernels.moe import EP8_STEP, Rank
from millrace_bench.kernels.tuning import Clock, Found, times_of

CUDA = torch.device("cuda")
TOKENS = (128, 256, 16384)
HEADS, NOPE, ROPE = 128, 128, 64
Options = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Rows:
    """All tasks of so many tokens. A kernel compiles at its first call."""

    num: int

    def __str__(self) -> str:
        return f"rows T={self.num}"

    def tasks(self) -> Iterator[tuple[Hashable, Callable[[], None]]]:
        yield from ()

    def measure(self, ready: set[Hashable], clock: Clock) -> Found:
        return Found(
            {"tokens": self.num, "ops": [report(self.num, task) for task in tasks(self.num) if not clock.is_over]}
        )


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
        norm = functools.partial(_norm, x, x.clone(), gain[0], plain)
        yield Task(f"rms_norm plain={plain}", norm, rms_norm.tile(num, hidden), tiles)
    heads = torch.randn(num, HEADS * NOPE, device=CUDA).bfloat16()
    rows_warps = [(4, 1), (8, 2), (16, 2), (16, 4), (32, 4), (32, 8)]
    yield Task("quant_groups", lambda *chosen: quant.quant_groups(heads, chosen), quant.config(num), rows_warps)
    up, k_pe = heads.new_zeros(num, HEADS, 2 * NOPE), heads.new_zeros(num, ROPE)
    expand = functools.partial(mla_expand.expand_kv, up, k_pe, NOPE)
    yield Task("expand_kv", expand, (64, 4), [*itertools.product((16, 32, 64), (2, 4, 8))])
    q = up.new_zeros(num, HEADS, NOPE + ROPE)[..., NOPE:]
    cos, sin = torch.zeros(2, num, ROPE // 2, device=CUDA)
    blocks = [*itertools.product((16, 32, 64, 128), (8, 16))]
    yield Task("rope_q", lambda *chosen: rope.rotate_into(q, q, cos, sin, chosen), rope.MANY, blocks)
    yield from _experts(num, rank)


def _norm(x: torch.Tensor, residual: torch.Tensor, gain: torch.Tensor, plain: bool, groups: int, warps: int) -> object:
    return rms_norm.rms_norm(x, residual, gain, 1e-6, True, plain, (groups, warps))


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
    tiles = [(rows, programs, warps) for rows, warps in rows_warps for programs in (8 * sms(), 16 * sms())]
    yield Task("silu_mul_quant", functools.partial(silu_mul_quant, gate_up, plan), (16, 8 * sms(), 4), tiles)
    y = torch.zeros(plan.num_rows, rank.dims.hidden, dtype=torch.bfloat16, device=CUDA)
    out = torch.empty(num, rank.dims.hidden, dtype=torch.bfloat16, device=CUDA)
    widths = [*itertools.product((256, 512, 1024, 2048, 4096, 8192), (1, 2, 4, 8))]
    yield Task("combine", lambda *chosen: combine(y, plan, weights, out, chosen), combine_tile(num), widths)


def tune(task: Task) -> dict[tuple[int, ...], float]:
    options = dict.fromkeys((task.used, *task.others))
    return times_of(task.op, options, lambda option: [functools.partial(task.run, *option)], CUDA)


def report(num: int, task: Task) -> dict[str, Any]:
    times = tune(task)
    best = next(iter(times))
    used = f"in use {task.used}: {times.get(task.used, float('nan')):.1f} us"
    print(f"{task.op} T={num}: {times[best]:.1f} us with {best}; {used}", flush=True)
    ranked = [[list(option), round(us, 2)] for option, us in times.items()]
    return {"op": task.op, "used": list(task.used), "us": ranked}


def jobs() -> list[Rows]:
    return [Rows(num) for num in TOKENS]
