"""The few-token products of a decode step: 1, 2, 4 and 16 tokens, V3's shapes.

A job is a few numbers, so that it travels to the process that compiles a configuration; inputs are made where they are
used.
"""

import functools
import itertools
import math
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from millrace_kernels.fp8 import BLOCK, Fp8, quant_blocks, reference_small_linear
from millrace_kernels.triton.gemv import Gemv
from millrace_kernels.triton.small_linear import MEASURED, SmallLinearConfig, config, reduce_parts, small_linear
from torch import Tensor

from millrace_bench.kernels.dense import EP8, TP8
from millrace_bench.kernels.driver import COLD_BYTES
from millrace_bench.kernels.timing import Call
from millrace_bench.kernels.tuned_file import Entry
from millrace_bench.kernels.tuning import GAIN, Clock, Found, blank, times_of

CUDA = torch.device("cuda")
MOST_SETS = 48
SAME = 2e-2  # rms error of BF16 results against the reference
Option = Gemv | SmallLinearConfig


def gemv_tiles(k: int) -> list[tuple[int, int, int]]:
    """block_n, block_k, warps: a lane loads 16 bytes of 2, 4 or 8 rows at once; one to eight tiles cover K."""
    found = []
    for block_k, loads, warps_n in itertools.product((512, 1024, 2048, 4096, 8192), (2, 4, 8), (1, 4)):
        warps_k, tiles = block_k // 512, math.ceil(k / block_k)
        few_idle = tiles * block_k <= 1.8 * k or block_k == 512
        small = tiles <= 8 and warps_k * warps_n <= 16 and loads * tiles <= 56 and not (loads == 8 and warps_k == 16)
        if few_idle and small and (warps_n == 1 or block_k <= 1024):
            found.append((loads * warps_n, block_k, warps_k * warps_n))
    return found


@dataclass(frozen=True)
class Linear:
    num: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"small_linear T={self.num} {self.n}x{self.k}"

    @property
    def nbytes(self) -> int:
        """Of the weight, which a call reads."""
        return self.n * self.k

    def tasks(self) -> Iterator[tuple[Hashable, Call]]:
        yield from ((self.key(option), functools.partial(self.compile, option)) for option in self.options())

    def measure(self, ready: set[Hashable], clock: Clock) -> Found | None:
        options = [option for option in self.options() if self.key(option) in ready]
        x, weights = self.inputs()
        times = times_of(
            self, options, lambda option: [functools.partial(small_linear, x, weight, option) for weight in weights],
            CUDA, wanted=reference_small_linear(x, weights[0]), same=SAME, is_over=lambda: clock.is_over,
        )  # fmt: skip
        return Found(self.row(times), self.entries(times)) if times else None

    def row(self, times: dict[Option, float]) -> dict[str, Any]:
        used, best = self.options()[0], next(iter(times))
        speed = {option: self.nbytes / us / 1e6 for option, us in times.items()}  # TB/s
        in_use = f"{times[used]:.2f} us, {speed[used]:.2f} TB/s with {used}" if used in times else f"no time of {used}"
        print(f"{self}: {times[best]:.2f} us, {speed[best]:.2f} TB/s with {best}; in use: {in_use}", flush=True)
        listed = [[repr(option), round(us, 2), round(speed[option], 2)] for option, us in times.items()]
        return {"job": str(self), "used": repr(used), "us_and_tb_per_s": listed}

    def options(self) -> list[Option]:
        """The configurations worth trying, the one in use first."""
        used, few = config(self.num, self.n, self.k), max(self.k // BLOCK // 3, 1)
        if self.num <= 4:
            dots = [SmallLinearConfig(32, splits, 4, 6) for splits in (1, 4) if splits <= few]
            return list(dict.fromkeys((used, *(Gemv(*tile) for tile in gemv_tiles(self.k)), *dots)))
        sizes = itertools.product((16, 32, 64), (1, 2, 4, 8), (4, 6))
        others = [SmallLinearConfig(block_n, splits, 4, stages) for block_n, splits, stages in sizes if splits <= few]
        programs = {other: -(-self.n // other.block_n) * other.splits for other in others}
        return list(dict.fromkeys((used, *(other for other in others if 100 <= programs[other] <= 1100))))

    def entries(self, times: dict[Option, float]) -> tuple[Entry, ...]:
        """The best, where it is faster than what is in use; else that, if it is a row."""
        key, used, best = (self.num, self.n, self.k), self.options()[0], next(iter(times))
        chosen = best if times[best] < GAIN * times.get(used, math.inf) else used
        return (Entry("small_linear", key, chosen, times[chosen]),) if chosen != used or key in MEASURED.rows else ()

    def key(self, option: Option) -> Hashable:
        """What is compiled: K of a product with one row, and that K is cut; not how often."""
        return ("gemv", self.num, self.k, option) if isinstance(option, Gemv) else ("gemm", option)

    def compile(self, option: Option) -> None:
        """On inputs of its own."""
        k = self.k if isinstance(option, Gemv) else 1024 if option.splits <= 8 else 128 * option.splits
        num = self.num if isinstance(option, Gemv) else 16
        small_linear(torch.zeros(num, k, dtype=torch.bfloat16, device=CUDA), blank(CUDA, 256, k), option)
        if isinstance(option, SmallLinearConfig) and option.splits > 1:
            reduce_parts(torch.zeros(option.splits, 256, device=CUDA), torch.zeros(256, device=CUDA).bfloat16())

    def inputs(self) -> tuple[Tensor, list[Fp8]]:
        """Rows, and as many copies of a weight as the L2 cache cannot hold."""
        sets = max(1, min(MOST_SETS, math.ceil(COLD_BYTES / self.nbytes)))
        first = quant_blocks(torch.randn(self.n, self.k, device=CUDA))
        copies = [Fp8(first.data.clone(), first.scales.clone()) for _ in range(sets - 1)]
        return torch.randn(self.num, self.k, device=CUDA).bfloat16(), [first, *copies]


def jobs() -> Iterator[Linear]:
    """Most wanted first."""
    tp8, both = ([(p.n, p.k) for p in products] for products in (TP8, (*TP8, *EP8)))
    shapes = [(1, *shape) for shape in dict.fromkeys(both)]
    yield from (Linear(*shape) for shape in [*shapes, *((num, *shape) for num in (2, 4, 16) for shape in tp8)])
