"""The FP8 product of 17 to 256 tokens beside DeepGEMM, at V3's shapes."""

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from millrace_kernels.fp8 import BLOCK, Fp8, dequant_blocks, quant_blocks, quant_groups
from millrace_kernels.gpu import sms
from millrace_kernels.lib import deep_gemm
from millrace_kernels.scratch import Scratch
from millrace_kernels.testing.tolerances import dequantised
from millrace_kernels.triton.fp8_linear import Fp8LinearConfig, fp8_linear
from torch import Tensor

from millrace_bench.data import read_data
from millrace_bench.kernels.driver import COLD_BYTES
from millrace_bench.kernels.timing import Call
from millrace_bench.kernels.tuned_file import Entry
from millrace_bench.kernels.tuning import GAIN, Clock, Found, blank, times_of

CUDA = torch.device("cuda")
# Most wanted first: an EP8 rank's o_proj, and what else it multiplies; then a TP8 rank's.
SHAPES = (
    (7168, 16384), (24576, 1536), (2112, 7168), (36864, 7168), (7168, 18432), (4096, 7168), (7168, 2048), (3072, 1536),
)  # fmt: skip
TOKENS = (128, 256, 64, 32)  # the classes, most wanted first
STEP = 16  # products at least in one graph: a model's step, which zeroes the counters once
SAME = 1e-2  # rms error of a BF16 result of exact products

# By tokens: a tile, and how many programs of it an SM holds.
TILES = {
    num: [(Fp8LinearConfig(m, n, 1, *rest), resident) for m, n, *rest, resident in tiles]
    for num, tiles in read_data("tiles.yaml").items()
}


def candidates(num: int, n: int, k: int) -> Iterator[Fp8LinearConfig]:
    """Each tile with K whole, unless half of the SMs were without work, and cut so that the programs fill the SMs about
    once or twice.
    """
    most = max(k // BLOCK // 3, 1)
    for tile, resident in TILES[num]:
        programs = -(-num // tile.block_m) * -(-n // tile.block_n)
        once = max(sms() * resident // programs, 1)
        wanted = (once, once + 1, 2 * once) if programs < 2 * sms() * resident else (1,)
        splits = {min(count, most) for count in wanted} | ({1} if programs > sms() // 2 else set())
        for count in sorted(splits):
            yield tile._replace(splits=count)
        if min(once, most) > 1:
            yield tile._replace(splits=min(once, most), joined=False)


def compile_ours(num: int, config: Fp8LinearConfig) -> None:
    """How K is cut is no part of what is compiled, only that it is."""
    fp8_linear(*_blank(num, 256, 1024), torch.bfloat16, config)


def compile_library(num: int, n: int, k: int) -> None:
    deep_gemm.fp8_linear(*_blank(num, n, k), torch.bfloat16)


def _blank(num: int, n: int, k: int) -> tuple[Fp8, Fp8]:
    zeros = functools.partial(torch.zeros, device=CUDA)
    x = Fp8(zeros(num, k).to(torch.float8_e4m3fn), zeros(k // BLOCK, num).t())
    return x, blank(CUDA, n, k)


def key(config: Fp8LinearConfig) -> Fp8LinearConfig:
    """What is compiled for it."""
    return config._replace(splits=min(config.splits, 2))


@functools.lru_cache(maxsize=1)
def draw_weights(n: int, k: int) -> list[Fp8]:
    first = quant_blocks(torch.randn(n, k, device=CUDA, dtype=torch.bfloat16))
    copies = max(int(COLD_BYTES / (n * k)), 1)
    return [first, *(Fp8(first.data.clone(), first.scales.clone()) for _ in range(copies))]


def step(product: Callable[[Fp8], Tensor], weights: list[Fp8], scratch: Scratch) -> None:
    with scratch.step():
        for weight in weights:
            product(weight)


@dataclass(frozen=True)
class Product:
    num: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"fp8_linear T={self.num} {self.n}x{self.k}"

    def tasks(self) -> Iterator[tuple[Hashable, Call]]:
        yield self, functools.partial(compile_library, self.num, self.n, self.k)
        for config in candidates(self.num, self.n, self.k):
            yield (self.num, key(config)), functools.partial(compile_ours, self.num, key(config))

    def measure(self, ready: set[Hashable], clock: Clock) -> Found:
        times = self.times([c for c in candidates(self.num, self.n, self.k) if (self.num, key(c)) in ready], clock)
        library = times.pop(None, math.inf)
        row: dict[str, Any] = {"tokens": self.num, "n": self.n, "k": self.k, "deep_gemm_us": library}
        if not times:
            return Found(row)
        (best, us), *_ = times.items()
        faster = us < GAIN * library
        rate = f"{us:.1f} us, {self.n * self.k / us / 1e6:.2f} TB/s with {best}; DeepGEMM {library:.1f} us"
        print(f"{self}: {'' if faster else 'slower: '}{rate}", flush=True)
        others = {"deep_gemm": library} if library < math.inf else {}
        entry = Entry("fp8_linear", (self.num, self.n, self.k), best if faster else None, us, others)
        listed = [{**config._asdict(), "us": us} for config, us in times.items() if config is not None]
        return Found(row | {"times": listed}, (entry,))

    def times(self, options: list[Fp8LinearConfig], clock: Clock) -> dict[Fp8LinearConfig | None, float]:
        """Microseconds of each configuration and of DeepGEMM (None) in a step."""
        x, scratch = quant_groups(torch.randn(self.num, self.k, device=CUDA, dtype=torch.bfloat16)), Scratch(CUDA)
        weights = draw_weights(self.n, self.k)
        turns = list(itertools.islice(itertools.cycle(weights), max(STEP, len(weights))))

        def steps(chosen: Fp8LinearConfig | None) -> list[Callable[[], None]]:
            return [functools.partial(step, functools.partial(_product, x, chosen), turns, scratch)]

        exact = F.linear(dequantised(x), dequant_blocks(*weights[0], torch.float32)).bfloat16()
        times = times_of(
            self, [None, *options], steps, CUDA, calls_per_graph=1, is_over=lambda: clock.is_over,
            wanted=exact, same=SAME, result=lambda chosen: _product(x, chosen, weights[0]),
        )  # fmt: skip
        return {chosen: us / len(turns) for chosen, us in times.items()}


def _product(x: Fp8, chosen: Fp8LinearConfig | None, weight: Fp8) -> Tensor:
    if chosen is None:
        return deep_gemm.fp8_linear(x, weight, torch.bfloat16)
    return fp8_linear(x, weight, torch.bfloat16, chosen)


def jobs() -> Iterator[Product]:
    yield from (Product(num, n, k) for (n, k), num in itertools.product(SHAPES, TOKENS))
