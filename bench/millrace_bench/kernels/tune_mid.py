"""Times configurations of the FP8 product for some tens of tokens beside DeepGEMM, at V3's shapes.

Prints the rows that are faster, for `fp8_linear.MEASURED`.

python -m millrace_bench.kernels.tune_mid [--tokens 128 64] [--seconds 90] [--out FILE]
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Hashable, Iterator

import torch
from millrace_kernels.fp8 import BLOCK, Fp8, quant_blocks, quant_groups
from millrace_kernels.gpu import sms
from millrace_kernels.lib import deep_gemm
from millrace_kernels.scratch import Scratch
from millrace_kernels.triton.fp8_linear import Config, fp8_linear
from torch import Tensor

from millrace_bench.kernels.driver import COLD_BYTES
from millrace_bench.kernels.tuning import Run, parser, times_of

CUDA = torch.device("cuda")
Shape = tuple[int, int, int]  # tokens, N, K
# Most wanted first: an EP8 rank's o_proj, and what else it multiplies; then a TP8 rank's.
SHAPES = (
    (7168, 16384), (24576, 1536), (2112, 7168), (36864, 7168), (7168, 18432), (4096, 7168), (7168, 2048), (3072, 1536),
)  # fmt: skip
TOKENS = (128, 256, 64, 32)  # the classes, most wanted first
STEP = 16  # products at least in one graph: a model's step, which zeroes the counters once
GAIN = 0.97  # a row is worth its line when it takes less than this part of DeepGEMM's time
COMPILE_PART = 0.55  # of the time, at most
SAME = 1e-2  # rms error between two BF16 results of the same sums

# By tokens: a tile, and how many programs of it an SM holds.
TILES: dict[int, tuple[tuple[Config, int], ...]] = {
    32: ((Config(32, 128, 1, 4, 4), 2), (Config(32, 128, 1, 4, 6), 1), (Config(32, 64, 1, 4, 6), 3)),
    64: (
        (Config(64, 128, 1, 4, 4), 2),
        (Config(64, 128, 1, 4, 3, 168), 3),
        (Config(64, 128, 1, 8, 6), 1),
        (Config(64, 64, 1, 4, 4), 3),
        (Config(64, 64, 1, 4, 6), 2),
    ),
    128: (
        (Config(128, 64, 1, 4, 3, 168), 3),
        (Config(128, 64, 1, 4, 4), 2),
        (Config(128, 64, 1, 8, 4), 2),
        (Config(128, 128, 1, 8, 6), 1),
        (Config(128, 128, 1, 8, 4), 1),
        (Config(64, 128, 1, 4, 4), 2),
    ),
    256: (
        (Config(256, 64, 1, 8, 5), 1),
        (Config(128, 128, 1, 8, 6), 1),
        (Config(128, 64, 1, 4, 3, 168), 3),
        (Config(128, 64, 1, 4, 4), 2),
    ),
}


def candidates(num: int, n: int, k: int) -> Iterator[Config]:
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


def compile_ours(num: int, config: Config) -> None:
    """How K is cut is no part of what is compiled, only that it is."""
    fp8_linear(*_blank(num, 256, 1024), torch.bfloat16, config)


def compile_library(num: int, n: int, k: int) -> None:
    deep_gemm.fp8_linear(*_blank(num, n, k), torch.bfloat16)


def _blank(num: int, n: int, k: int) -> tuple[Fp8, Fp8]:
    zeros = functools.partial(torch.zeros, device=CUDA)
    x = Fp8(zeros(num, k).to(torch.float8_e4m3fn), zeros(k // BLOCK, num).t())
    return x, Fp8(zeros(n, k, dtype=torch.uint8).view(torch.float8_e4m3fn), zeros(-(-n // BLOCK), k // BLOCK))


def key(config: Config) -> Config:
    """What is compiled for it."""
    return config._replace(splits=min(config.splits, 2))


def compiled(cases: list[Shape]) -> Iterator[tuple[Hashable, Callable[[], None]]]:
    """(tokens, key) and (tokens, N, K): what compiles them."""
    for num, n, k in cases:
        yield (num, n, k), functools.partial(compile_library, num, n, k)
        for config in candidates(num, n, k):
            yield (num, key(config)), functools.partial(compile_ours, num, key(config))


@functools.lru_cache(maxsize=1)
def draw_weights(n: int, k: int) -> list[Fp8]:
    first = quant_blocks(torch.randn(n, k, device=CUDA, dtype=torch.bfloat16))
    copies = max(int(COLD_BYTES / (n * k)), 1)
    return [first, *(Fp8(first.data.clone(), first.scales.clone()) for _ in range(copies))]


def step(product: Callable[[Fp8], Tensor], weights: list[Fp8], scratch: Scratch) -> None:
    with scratch.step():
        for weight in weights:
            product(weight)


def tune(num: int, n: int, k: int, ready: set[Hashable]) -> dict[Config | None, float]:
    """Microseconds of each configuration and of DeepGEMM (None) in a step."""
    x, scratch = quant_groups(torch.randn(num, k, device=CUDA, dtype=torch.bfloat16)), Scratch(CUDA)
    weights = draw_weights(n, k)
    turns = list(itertools.islice(itertools.cycle(weights), max(STEP, len(weights))))

    def steps(chosen: Config | None) -> list[Callable[[], None]]:
        return [functools.partial(step, functools.partial(_product, x, chosen), turns, scratch)]

    options = [None, *(config for config in candidates(num, n, k) if (num, key(config)) in ready)]
    times = times_of(
        (num, n, k), options, steps, CUDA, calls_per_graph=1,
        wanted=_product(x, None, weights[0]), same=SAME, result=lambda chosen: _product(x, chosen, weights[0]),
    )  # fmt: skip
    return {chosen: us / len(turns) for chosen, us in times.items()}


def _product(x: Fp8, chosen: Config | None, weight: Fp8) -> Tensor:
    if chosen is None:
        return deep_gemm.fp8_linear(x, weight, torch.bfloat16)
    return fp8_linear(x, weight, torch.bfloat16, chosen)


def report(num: int, n: int, k: int, times: dict[Config | None, float]) -> dict[str, object]:
    library = times.get(None, float("inf"))
    ours = {config: us for config, us in times.items() if config is not None}
    best = next(iter(ours), None)
    row: dict[str, object] = {"tokens": num, "n": n, "k": k, "deep_gemm_us": library}
    if best is None:
        return row
    rates = f"{ours[best]:.1f} us, {n * k / ours[best] / 1e6:.2f} TB/s; DeepGEMM {library:.1f} us"
    found = f"({num}, {n}, {k}): {best!r},  # {rates}"
    print(f"    {found}" if ours[best] < GAIN * library else f"    # slower: {found}", flush=True)
    return row | {"times": [{**config._asdict(), "us": us} for config, us in ours.items()]}


def main() -> None:
    options = parser("Tune the FP8 product of some tens of tokens.", 90.0)
    options.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), choices=TOKENS)
    args = options.parse_args()
    run = Run("tune_mid", args)
    cases = [(num, n, k) for (n, k), num in itertools.product(SHAPES, args.tokens)]
    ready = run.compile(compiled(cases), COMPILE_PART)
    run.measure(cases, lambda case: report(*case, tune(*case, ready)))


if __name__ == "__main__":
    main()
