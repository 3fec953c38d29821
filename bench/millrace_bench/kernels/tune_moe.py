"""Times configurations of our grouped experts beside DeepGEMM's layouts and the few-token kernels, at V3's shapes;
prints the rows of `MEASURED` in millrace_kernels/triton/moe_grouped.py that are the fastest, and writes all times as
JSON.

The two launches are timed one by one; for each height of a tile the best of both make the op, whose time is compared.
A configuration that is not compiled in time is left out, and so are sizes that the time did not reach.

python -m millrace_bench.kernels.tune_moe [--ranks "EP8 step" EP8] [--seconds 180] [--out FILE]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import BLOCK, Fp8, Operand, quant_groups
from millrace_kernels.lib import deep_gemm_grouped
from millrace_kernels.moe_experts import expected_rows
from millrace_kernels.triton import moe_grouped, moe_small
from millrace_kernels.triton.moe_grouped import LEFT_ROWS, Config, Launch
from millrace_kernels.triton.moe_route import Blocks, Route, route
from torch import Tensor

from millrace_bench.common import Record, print_record
from millrace_bench.kernels.compile_ahead import compile_ahead
from millrace_bench.kernels.moe import EP8, EP8_STEP, TP8_SHARED, Rank, draw_weights
from millrace_bench.kernels.numeric import rms_error
from millrace_bench.kernels.timing import time_us

CUDA = torch.device("cuda")
ROUTINGS = 4  # in turns, so that few tokens do not find their experts in the L2 cache
SIZES = {  # most wanted first
    EP8_STEP: (128, 256, 64, 32, 16),
    EP8: (1024, 2048),
    TP8_SHARED: (128, 64, 256, 512, 1024, 8, 16, 32),
}
SHARED_BYTES = 227 * 1024  # of an SM, for one program
GAIN = 0.97  # a row is worth its line when it takes less than this part of the next best's time
COMPILE_PART = 0.5  # of the time, at most
SAME = 2e-2  # rms error between two computations with FP8 between the products
Routings = list[tuple[Tensor, Tensor]]
Times = dict[Any, float]  # microseconds, ascending

UPS = (
    *(Launch(warps, stages, left=True) for warps, stages in ((4, 2), (4, 3), (4, 5), (8, 2), (8, 3), (8, 4), (8, 5))),
    *(Launch(warps, stages) for warps, stages in ((4, 3), (4, 4), (8, 3), (8, 4))),
)
DOWNS = (
    *(Launch(*shape, left=True) for shape in itertools.product((4, 8), (3, 4, 6), (64, 128))),
    *(Launch(*shape) for shape in itertools.product((4, 8), (3, 4), (64, 128))),
)


def heights(rows: int) -> tuple[int, ...]:
    """Of tiles: one or two for an expert with so many rows."""
    return tuple(m for m in (16, 32, 64, 128) if rows <= m <= 2 * max(rows, 16))


def fits(block_m: int, up: bool, launch: Launch) -> bool:
    columns = 2 * BLOCK if up else launch.block_n
    if launch.left and block_m < LEFT_ROWS:
        return False
    return launch.stages * (block_m + columns) * BLOCK <= SHARED_BYTES


def launches(block_m: int, up: bool) -> list[Launch]:
    return [launch for launch in (UPS if up else DOWNS) if fits(block_m, up, launch)]


@dataclass(frozen=True)
class Job:
    rank: Rank
    num: int

    @property
    def rows(self) -> int:
        return expected_rows(self.num, self.rank.dims.top_k, self.rank.experts)

    def kernels(self) -> Iterable[tuple[int, int, bool, Launch]]:
        """I, height of a tile, which of the two launches, its configuration: what is compiled."""
        for block_m, up in itertools.product(heights(self.rows), (True, False)):
            yield from ((self.rank.size, block_m, up, launch) for launch in launches(block_m, up))


class Plans:
    """The routings of a job, and its rows quantised."""

    def __init__(self, job: Job, routings: Routings, w13: Fp8, w2: Fp8) -> None:
        self.job, self.routings, self.weights = job, routings, (w13, w2)
        generator = torch.Generator(device=CUDA).manual_seed(job.num)
        self.x = torch.randn(job.num, job.rank.dims.hidden, generator=generator, device=CUDA).bfloat16()
        self.fp8 = quant_groups(self.x)

    def plan(self, block_m: int) -> list[tuple[Route, Blocks]]:
        rank, plans = self.job.rank, []
        for _, experts in self.routings:
            at = (experts, rank.held, rank.shared, block_m)
            plan, blocks = route(*at, gather=True, scales=self.fp8.scales)
            assert blocks is not None
            plans.append((plan, blocks))
        return plans

    def ups(self, block_m: int, launch: Launch) -> list[Callable[[], Fp8]]:
        first = functools.partial(moe_grouped.gate_up, self.fp8, self.weights[0])
        return [functools.partial(first, *_pair(launch, plan), block_m, launch) for plan in self.plan(block_m)]

    def downs(self, block_m: int, launch: Launch) -> list[Callable[[], Tensor]]:
        plans, some = self.plan(block_m), Launch(8, 3)
        hs = [moe_grouped.gate_up(self.fp8, self.weights[0], *_pair(some, plan), block_m, some) for plan in plans]
        w2 = self.weights[1]
        return [
            functools.partial(moe_grouped.down, h, w2, plan, blocks, block_m, launch)
            for h, (plan, blocks) in zip(hs, plans, strict=True)
        ]

    def whole(self, run: Callable[..., Tensor], plain: bool = False, **options: Any) -> list[Callable[[], Tensor]]:
        x = Operand(self.x, None) if plain else Operand(None, self.fp8)
        rank = self.job.rank
        return [
            functools.partial(run, x, *routing, *self.weights, shared_expert=rank.shared, **options)
            for routing in self.routings
        ]


def _pair(launch: Launch, plan: tuple[Route, Blocks]) -> tuple[Route, Blocks]:
    """With what the launch reads."""
    return plan[0], plan[1] if launch.left else plan[1]._replace(scales=None)


def compile_one(size: int, block_m: int, up: bool, launch: Launch) -> None:
    """On two experts of that size."""
    rank = Rank("blank", TP8_SHARED.dims, 2, size, folded=True)
    routings = [(torch.zeros(64, 8, device=CUDA), torch.zeros(64, 8, dtype=torch.int32, device=CUDA))]
    plans = Plans(Job(rank, 64), routings, *blank_weights(2, rank.dims.hidden, size))
    (plans.ups if up else plans.downs)(block_m, launch)[0]()


def blank_weights(held: int, dim: int, size: int) -> tuple[Fp8, Fp8]:
    shapes = ((held, 2 * size, dim), (held, dim, size))
    w13, w2 = (
        Fp8(
            torch.zeros(e, n, k, dtype=torch.uint8, device=CUDA).view(torch.float8_e4m3fn),
            torch.zeros(e, n // BLOCK, k // BLOCK, device=CUDA),
        )
        for e, n, k in shapes
    )
    return w13, w2


def others(plans: Plans) -> dict[str, list[Callable[[], Tensor]]]:
    """What else runs the op at this size, and ours with the configuration in use."""
    rank, num = plans.job.rank, plans.job.num
    seen: dict[str, Any] = {"num_experts": rank.experts}
    found = {
        "packed": plans.whole(deep_gemm_grouped.moe_experts_fp8, **seen),
        "grouped, in use": plans.whole(moe_grouped.moe_experts_fp8, **seen),
    }
    if num <= SMALL_TOKENS:
        found["small"] = plans.whole(moe_small.moe_experts_fp8, plain=True, **seen)
    return found


def tune(plans: Plans, ready: set[Hashable], until: float) -> dict[str, Times]:
    """Times of `up` and `down` by (height, launch), and of whole ops (`op`) by name or configuration."""
    job = plans.job
    times: dict[str, Times] = {"up": {}, "down": {}, "op": {}}
    reference = others(plans)
    wanted = reference["packed"][0]()
    for name, calls in reference.items():
        _time(times["op"], name, calls, wanted)
    for size, block_m, up, launch in job.kernels():
        if (size, block_m, up, launch) in ready and time.monotonic() < until:
            make = plans.ups if up else plans.downs
            _time(times["up" if up else "down"], (block_m, launch), make(block_m, launch))
    for block_m in heights(job.rows):
        ups, downs = ([key[1] for key in _sorted(times[name]) if key[0] == block_m] for name in ("up", "down"))
        if ups and downs:
            config = Config(block_m, ups[0], downs[0])
            _time(times["op"], config, plans.whole(moe_grouped.run, config=config), wanted)
    return {name: _sorted(found) for name, found in times.items()}


def _time(times: Times, name: object, calls: Sequence[Callable[[], Any]], wanted: Tensor | None = None) -> None:
    """Into `times`; what fails or gives another result is left out."""
    try:
        if wanted is not None:
            error = rms_error(calls[0](), wanted)
            assert error <= SAME, f"differs from DeepGEMM by {error:.1e}"
        times[name] = time_us(calls, CUDA, samples=3)
    except Exception as failure:  # too much shared memory, say
        print(f"{name}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)


def _sorted(times: Times) -> Times:
    return dict(sorted(times.items(), key=lambda item: item[1]))


def report(job: Job, times: dict[str, Times]) -> dict[str, Any]:
    ops, rank = times["op"], job.rank
    ours = {config: us for config, us in ops.items() if isinstance(config, Config)}
    theirs = {name: us for name, us in ops.items() if isinstance(name, str) and not name.startswith("grouped")}
    listed = ", ".join(f"{name} {us:.1f}" for name, us in ops.items() if isinstance(name, str))
    print(f"# {rank.name} T={job.num}, us: {listed}", flush=True)
    if ours:
        config, us = next(iter(ours.items()))
        row = f"({job.rows}, {rank.held}, {rank.size}): {config!r},  # {us:.1f} us"
        print(f"    {row}" if us < GAIN * min(theirs.values()) else f"    # slower: {row}", flush=True)
    ranked = {name: [[str(key), round(us, 2)] for key, us in found.items()] for name, found in times.items()}
    return {"rank": rank.name, "tokens": job.num, "expected_rows": job.rows, **ranked}


def jobs(names: Sequence[str]) -> list[Job]:
    return [Job(rank, num) for rank, sizes in SIZES.items() if rank.name in names for num in sizes]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune the experts' kernels.")
    names = [rank.name for rank in SIZES]
    parser.add_argument("--ranks", nargs="+", default=names, choices=names)
    parser.add_argument("--seconds", type=float, default=180.0, help="for everything")
    parser.add_argument("--out", type=Path, help="a file for the JSON, rewritten after every size")
    args = parser.parse_args()
    until, wanted = time.monotonic() + args.seconds, jobs(args.ranks)
    tasks: dict[Hashable, Callable[[], None]] = {
        key: functools.partial(compile_one, *key) for job in wanted for key in job.kernels()
    }
    ready = compile_ahead(tasks, until - (1 - COMPILE_PART) * args.seconds)
    rows: list[dict[str, Any]] = []
    record = Record("tune_moe", vars(args), {"rows": rows})  # its rows are still to come
    for job in wanted:
        if time.monotonic() > until:
            print(f"no time left for {job}", flush=True)
            continue
        generator = torch.Generator(device=CUDA).manual_seed(job.num)
        routings = [job.rank.choose(job.num, CUDA, generator, 0.0) for _ in range(ROUTINGS)]
        weights = draw_weights(job.rank.held, job.rank.dims.hidden, job.rank.size, CUDA)
        rows.append(report(job, tune(Plans(job, routings, *weights), ready, until)))
        if args.out:
            args.out.write_text(record.to_json() + "\n")
    print_record(record)


if __name__ == "__main__":
    main()
