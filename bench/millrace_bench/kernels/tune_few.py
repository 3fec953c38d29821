"""The few-token products and experts of a decode step: 1, 2, 4 and 16 tokens, V3's shapes.

A job is a few numbers, so that it travels to the process that compiles a configuration; inputs are made where they are
used. TP8's experts are 256 and the shared one, an eighth of each.
"""

from __future__ import annotations

import functools
import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from millrace_kernels.fp8 import BLOCK, Fp8, quant_blocks, reference_small_linear
from millrace_kernels.moe_experts import reference_experts
from millrace_kernels.testing.expert_inputs import choose
from millrace_kernels.triton import moe_one, moe_small
from millrace_kernels.triton.gemv import Gemv
from millrace_kernels.triton.small_linear import MEASURED, SmallLinearConfig, config, reduce_parts, small_linear
from torch import Tensor

from millrace_bench.kernels.dense import EP8, TP8
from millrace_bench.kernels.driver import COLD_BYTES
from millrace_bench.kernels.moe import TP8_SHARED, draw_weights
from millrace_bench.kernels.timing import Call
from millrace_bench.kernels.tuned_file import Entry
from millrace_bench.kernels.tuning import GAIN, Clock, Found, times_of

CUDA = torch.device("cuda")
MOST_SETS = 48
SAME = 2e-2  # rms error against the reference; BF16 results and a BF16 value between two products
Calls = list[Callable[[], Tensor]]  # the same work on inputs that take turns


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


class FewTokens(ABC):
    """What both kinds of job share."""

    def tasks(self) -> Iterator[tuple[Hashable, Call]]:
        yield from ((self.key(option), functools.partial(self.compile, option)) for option in self.options())

    def measure(self, ready: set[Hashable], clock: Clock) -> Found | None:
        options = [option for option in self.options() if self.key(option) in ready]
        try:
            times = times_of(
                self, options, self.calls, CUDA, wanted=self.wanted(), same=SAME, is_over=lambda: clock.is_over
            )
            return Found(self.row(times), self.entries(times)) if times else None
        finally:
            self.__dict__.pop("inputs", None)

    def row(self, times: dict[Any, float]) -> dict[str, Any]:
        used, best = self.options()[0], next(iter(times))
        speed = {option: self.nbytes / us / 1e6 for option, us in times.items()}  # TB/s
        in_use = f"{times[used]:.2f} us, {speed[used]:.2f} TB/s with {used}" if used in times else f"no time of {used}"
        print(f"{self}: {times[best]:.2f} us, {speed[best]:.2f} TB/s with {best}; in use: {in_use}", flush=True)
        listed = [[repr(option), round(us, 2), round(speed[option], 2)] for option, us in times.items()]
        return {"job": str(self), "used": repr(used), "us_and_tb_per_s": listed}

    def entries(self, times: dict[Any, float]) -> tuple[Entry, ...]:
        """Only products have a table."""
        return ()

    @property
    @abstractmethod
    def nbytes(self) -> float:
        """Of the weights that one call reads."""

    @abstractmethod
    def options(self) -> list[Any]:
        """The configurations worth trying, the one in use first."""

    @abstractmethod
    def key(self, option: Any) -> Hashable:
        """What is compiled for it."""

    @abstractmethod
    def compile(self, option: Any) -> None:
        """On inputs of its own."""

    @abstractmethod
    def calls(self, option: Any) -> Calls:
        """The work with it."""

    @abstractmethod
    def wanted(self) -> Tensor:
        """What its first call gives."""


@dataclass(frozen=True)
class Linear(FewTokens):
    num: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"small_linear T={self.num} {self.n}x{self.k}"

    @property
    def nbytes(self) -> float:
        return self.n * self.k

    def options(self) -> list[Any]:
        used, few = config(self.num, self.n, self.k), max(self.k // BLOCK // 3, 1)
        if self.num <= 4:
            dots = [SmallLinearConfig(32, splits, 4, 6) for splits in (1, 4) if splits <= few]
            return list(dict.fromkeys((used, *(Gemv(*tile) for tile in gemv_tiles(self.k)), *dots)))
        sizes = itertools.product((16, 32, 64), (1, 2, 4, 8), (4, 6))
        others = [SmallLinearConfig(block_n, splits, 4, stages) for block_n, splits, stages in sizes if splits <= few]
        programs = {other: -(-self.n // other.block_n) * other.splits for other in others}
        return list(dict.fromkeys((used, *(other for other in others if 100 <= programs[other] <= 1100))))

    def entries(self, times: dict[Any, float]) -> tuple[Entry, ...]:
        """The best, where it is faster than what is in use; else that, if it is a row."""
        key, used, best = (self.num, self.n, self.k), self.options()[0], next(iter(times))
        chosen = best if times[best] < GAIN * times.get(used, math.inf) else used
        return (Entry("small_linear", key, chosen, times[chosen]),) if chosen != used or key in MEASURED.rows else ()

    def key(self, option: Any) -> Any:
        """What is compiled: K of a product with one row, and that K is cut; not how often."""
        return ("gemv", self.num, self.k, option) if isinstance(option, Gemv) else ("gemm", option)

    def compile(self, option: Any) -> None:
        k = self.k if isinstance(option, Gemv) else 1024 if option.splits <= 8 else 128 * option.splits
        num = self.num if isinstance(option, Gemv) else 16
        weight = Fp8(torch.zeros(256, k, dtype=torch.uint8, device=CUDA).view(torch.float8_e4m3fn), _scales(256, k))
        small_linear(torch.zeros(num, k, dtype=torch.bfloat16, device=CUDA), weight, option)
        if isinstance(option, SmallLinearConfig) and option.splits > 1:
            reduce_parts(torch.zeros(option.splits, 256, device=CUDA), torch.zeros(256, device=CUDA).bfloat16())

    @functools.cached_property
    def inputs(self) -> tuple[Tensor, list[Fp8]]:
        sets = max(1, min(MOST_SETS, math.ceil(COLD_BYTES / self.nbytes)))
        first = quant_blocks(torch.randn(self.n, self.k, device=CUDA))
        copies = [Fp8(first.data.clone(), first.scales.clone()) for _ in range(sets - 1)]
        return torch.randn(self.num, self.k, device=CUDA).bfloat16(), [first, *copies]

    def calls(self, option: Any) -> Calls:
        x, weights = self.inputs
        return [functools.partial(small_linear, x, weight, option) for weight in weights]

    def wanted(self) -> Tensor:
        return reference_small_linear(self.inputs[0], self.inputs[1][0])


def _scales(n: int, k: int) -> Tensor:
    return torch.zeros(-(-n // BLOCK), -(-k // BLOCK), device=CUDA)


@dataclass(frozen=True)
class Experts(FewTokens):
    """One of the two launches; beside it the other one as it is in use, whose time is in all figures."""

    num: int
    down: bool

    def __str__(self) -> str:
        return f"moe_small T={self.num} {'down' if self.down else 'gate_up'} (both are timed)"

    @property
    def nbytes(self) -> float:
        named = [len(set(experts.flatten().tolist())) + 1 for _, experts in _routings(self.num)]
        return 3 * TP8_SHARED.size * TP8_SHARED.dims.hidden * sum(named) / len(named)

    def options(self) -> list[Any]:
        used = moe_small.configs(self.num)[self.down]
        others: list[Any]
        if self.num > 4:
            sizes = itertools.product((16, 32, 64), (4, 8), (4, 6))
            others = [moe_small.MoeSmallConfig(*size) for size in sizes]
        elif self.down:
            others = [moe_one.MoeOneConfig(*tile) for tile in gemv_tiles(2304)]
        else:  # gate and up: twice the loads
            others = [moe_one.MoeOneConfig(n // 2, k, warps) for n, k, warps in gemv_tiles(7168) if n <= 8]
        return list(dict.fromkeys((used, *others)))

    def key(self, option: Any) -> Any:
        return ("experts", self.down, option)

    def compile(self, option: Any) -> None:
        (held, dim, size), num = (TP8_SHARED.held, TP8_SHARED.dims.hidden, TP8_SHARED.size), self.num
        w13, w2 = (
            Fp8(torch.empty(held, n, k, dtype=torch.float8_e4m3fn, device=CUDA),
                torch.empty(held, n // BLOCK, k // BLOCK, device=CUDA)) for n, k in ((2 * size, dim), (dim, size))
        )  # fmt: skip
        x = torch.zeros(num, dim, dtype=torch.bfloat16, device=CUDA)
        weights, experts = torch.zeros(num, 8, device=CUDA), torch.zeros(num, 8, dtype=torch.int32, device=CUDA)
        self._run(option, x, weights, experts, w13, w2)

    def _run(self, option: Any, *inputs: Any) -> Tensor:
        up, down = moe_small.configs(self.num)
        pair: Any = (up, option) if self.down else (option, down)
        x, weights, experts, w13, w2 = inputs
        return moe_small.run(x, weights, experts, w13, w2, True, pair)

    @property
    def inputs(self) -> list[tuple[Any, ...]]:
        weights = draw_weights(TP8_SHARED.held, TP8_SHARED.dims.hidden, TP8_SHARED.size, CUDA)
        return [(_rows(self.num), *routing, *weights) for routing in _routings(self.num)]

    def calls(self, option: Any) -> Calls:
        return [functools.partial(self._run, option, *inputs) for inputs in self.inputs]

    def wanted(self) -> Tensor:
        x, weights, experts, w13, w2 = self.inputs[0]
        return reference_experts(x, weights, experts, w13, w2, shared_expert=True)


@functools.cache
def _rows(num: int) -> Tensor:
    return torch.randn(num, TP8_SHARED.dims.hidden, device=CUDA).bfloat16()


@functools.cache
def _routings(num: int) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator(device=CUDA).manual_seed(num)
    return [choose(num, TP8_SHARED.dims, CUDA, generator) for _ in range(4)]


def jobs() -> Iterator[Linear | Experts]:
    """Most wanted first."""
    tp8, both = ([(p.n, p.k) for p in products] for products in (TP8, (*TP8, *EP8)))
    yield from (Linear(1, n, k) for n, k in tp8)
    yield from (Experts(1, down) for down in (False, True))
    yield from (Linear(1, n, k) for n, k in dict.fromkeys(both) if (n, k) not in tp8)
    for num in (2, 4, 16):
        yield from (Linear(num, n, k) for n, k in tp8)
        yield from (Experts(num, down) for down in (False, True))
