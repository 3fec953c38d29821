"""Our grouped experts beside DeepGEMM and the few-token kernels, at V3's shapes.

The two launches are timed one by one; for each height of a tile the best of both make the op, whose time is compared.
"""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import BLOCK, Fp8, Operand, quant_groups
from millrace_kernels.lib import deep_gemm_grouped
from millrace_kernels.moe_experts import expected_rows
from millrace_kernels.triton import moe_grouped, moe_small
from millrace_kernels.triton.moe_grouped import LEFT_ROWS, Launch, MoeGroupedConfig
from millrace_kernels.triton.moe_route import Blocks, ExpertRoute, route
from millrace_kernels.tuned import Key
from torch import Tensor

from millrace_bench.data import read_data
from millrace_bench.kernels.moe import EP8, EP8_STEP, TP8_SHARED, Rank, draw_weights
from millrace_bench.kernels.tuned_file import Entry
from millrace_bench.kernels.tuning import GAIN, Clock, Found, blank, times_of

CUDA = torch.device("cuda")
ROUTINGS = 4  # in turns, so that few tokens do not find their experts in the L2 cache
SIZES = {  # most wanted first
    EP8_STEP: (128, 256, 64, 32, 16),
    EP8: (1024, 2048),
    TP8_SHARED: (128, 64, 256, 512, 1024, 8, 16, 32),
}
SHARED_BYTES = 227 * 1024  # of an SM, for one program
TWINS = {257: 256, 33: 32}  # ranks without the shared expert take the rows of those with it
SAME = 2e-2  # rms error between two computations with FP8 between the products
Routings = list[tuple[Tensor, Tensor]]
Times = dict[Any, float]  # microseconds, ascending
Option = tuple[int, Launch]  # height of a tile, configuration

UPS, DOWNS = (
    tuple(Launch(*shape)._replace(left=left) for left, shapes in of_sides.items() for shape in shapes)
    for of_sides in read_data("moe-tiles.yaml").values()
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

    def __str__(self) -> str:
        return f"moe_grouped {self.rank.name} T={self.num}"

    @property
    def rows(self) -> int:
        return expected_rows(self.num, self.rank.dims.top_k, self.rank.experts)

    def kernels(self) -> Iterable[tuple[int, int, bool, Launch]]:
        """I, height of a tile, which of the two launches, its configuration: what is compiled."""
        for block_m, up in itertools.product(heights(self.rows), (True, False)):
            yield from ((self.rank.size, block_m, up, launch) for launch in launches(block_m, up))

    def tasks(self) -> Iterator[tuple[Hashable, Callable[[], None]]]:
        yield from ((key, functools.partial(compile_one, *key)) for key in self.kernels())

    def measure(self, ready: set[Hashable], clock: Clock) -> Found:
        rank, generator = self.rank, torch.Generator(device=CUDA).manual_seed(self.num)
        routings = [rank.choose(self.num, CUDA, generator, 0.0) for _ in range(ROUTINGS)]
        plans = Plans(self, routings, *draw_weights(rank.held, rank.dims.hidden, rank.size, CUDA))
        return report(self, tune(plans, ready, lambda: clock.is_over))

    @property
    def key(self) -> Key:
        """Of the table."""
        return self.rows, self.rank.held, self.rank.size


class Plans:
    """The routings of a job, and its rows quantised."""

    def __init__(self, job: Job, routings: Routings, w13: Fp8, w2: Fp8) -> None:
        self.job, self.routings, self.weights = job, routings, (w13, w2)
        generator = torch.Generator(device=CUDA).manual_seed(job.num)
        self.x = torch.randn(job.num, job.rank.dims.hidden, generator=generator, device=CUDA).bfloat16()
        self.fp8 = quant_groups(self.x)

    def plan(self, block_m: int) -> list[tuple[ExpertRoute, Blocks]]:
        rank = self.job.rank
        return [route(experts, rank.held, rank.shared, block_m, self.fp8.scales) for _, experts in self.routings]

    def ups(self, option: Option) -> list[Callable[[], Fp8]]:
        block_m, launch = option
        first = functools.partial(moe_grouped.gate_up, self.fp8, self.weights[0])
        return [functools.partial(first, *_pair(launch, plan), block_m, launch) for plan in self.plan(block_m)]

    def downs(self, option: Option) -> list[Callable[[], Tensor]]:
        block_m, launch = option
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


def _pair(launch: Launch, plan: tuple[ExpertRoute, Blocks]) -> tuple[ExpertRoute, Blocks]:
    """With what the launch reads."""
    return plan[0], plan[1] if launch.left else plan[1]._replace(scales=None)


def compile_one(size: int, block_m: int, up: bool, launch: Launch) -> None:
    """On two experts of that size."""
    rank = Rank("blank", TP8_SHARED.dims, 2, size, folded=True)
    routings = [(torch.zeros(64, 8, device=CUDA), torch.zeros(64, 8, dtype=torch.int32, device=CUDA))]
    w13, w2 = blank(CUDA, 2, 2 * size, rank.dims.hidden), blank(CUDA, 2, rank.dims.hidden, size)
    plans = Plans(Job(rank, 64), routings, w13, w2)
    (plans.ups if up else plans.downs)((block_m, launch))[0]()


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


def tune(plans: Plans, ready: set[Hashable], is_over: Callable[[], bool]) -> dict[str, Times]:
    """Times of `up` and `down` by (height, launch), and of whole ops (`op`) by name or configuration."""
    job, reference, times = plans.job, others(plans), {}
    wanted = reference["grouped, in use"][0]()
    for name, make in (("up", plans.ups), ("down", plans.downs)):
        keys = [key for key in job.kernels() if key[2] == (name == "up") and key in ready]
        options = [(block_m, launch) for _, block_m, _, launch in keys]
        times[name] = times_of(name, options, make, CUDA, is_over=is_over)
    whole: dict[Any, list[Callable[[], Tensor]]] = dict(reference)
    for block_m in heights(job.rows):
        ups, downs = ([launch for height, launch in times[name] if height == block_m] for name in ("up", "down"))
        if ups and downs:
            config = MoeGroupedConfig(block_m, ups[0], downs[0])
            whole[config] = plans.whole(moe_grouped.run, config=config)
    return times | {"op": times_of(job.rank.name, whole, whole.__getitem__, CUDA, wanted=wanted, same=SAME)}


def report(job: Job, times: dict[str, Times]) -> Found:
    ops, rank = times["op"], job.rank
    ours = {config: us for config, us in ops.items() if isinstance(config, MoeGroupedConfig)}
    theirs = {name: us for name, us in ops.items() if isinstance(name, str) and not name.startswith("grouped")}
    listed = ", ".join(f"{name} {us:.1f}" for name, us in ops.items() if isinstance(name, str))
    print(f"# {job}, us: {listed}", flush=True)
    entries: list[Entry] = []
    if ours:
        config, us = next(iter(ours.items()))
        faster = us < GAIN * min(theirs.values(), default=math.inf)
        print(f"{job}: {'' if faster else 'slower: '}{us:.1f} us with {config}", flush=True)
        entries += entries_of(job, config if faster else None, us, theirs)
    ranked = {name: [[str(key), round(us, 2)] for key, us in found.items()] for name, found in times.items()}
    row = {"rank": rank.name, "tokens": job.num, "expected_rows": job.rows, **ranked}
    return Found(row, tuple(entries))


def entries_of(job: Job, chosen: MoeGroupedConfig | None, us: float, theirs: dict[str, float]) -> Iterator[Entry]:
    """Of jobs with the same expected rows the one with the most tokens decides; twins that no job measures follow."""
    same = [other.num for other in jobs() if other.key == job.key]
    if job.num < max(same, default=0):
        return
    yield Entry("moe_grouped", job.key, chosen, us, theirs)
    twin = (job.rows, TWINS.get(job.rank.held, 0), job.rank.size)
    if twin[1] and twin not in {other.key for other in jobs()}:
        yield Entry("moe_grouped", twin, chosen, copy_of=job.key)


def jobs() -> list[Job]:
    return [Job(rank, num) for rank, sizes in SIZES.items() for num in sizes]
