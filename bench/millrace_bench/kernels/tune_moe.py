"""Times configurations of our experts' kernels for more than a few tokens; prints the best and all as JSON.

python -m millrace_bench.kernels.tune_moe [--rank TP8] [--tokens 32 128] [--quick]
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from millrace_kernels.fp8 import Fp8, Operand, quant_groups
from millrace_kernels.testing.experts import choose
from millrace_kernels.testing.timing import time_us
from millrace_kernels.triton import moe_grouped
from millrace_kernels.triton.moe_route import expected_rows
from torch import Tensor

from millrace_bench.common import Record, print_record
from millrace_bench.kernels.moe import EP8, TP8, Rank, draw_weights

CUDA = torch.device("cuda")
ROUTINGS = 4  # in turns, so that few tokens do not find their experts in the L2 cache


class Inputs(NamedTuple):
    x: Tensor
    weights: Tensor
    experts: Tensor
    w13: Fp8
    w2: Fp8
    first_expert: int


def inputs(rank: Rank, num: int) -> list[Inputs]:
    w13, w2 = draw_weights(rank.held, rank.dims.hidden, rank.size, CUDA)
    generator = torch.Generator(device=CUDA).manual_seed(num)
    x = torch.randn(num, rank.dims.hidden, generator=generator, device=CUDA).bfloat16()
    routings = [choose(num, rank.dims, CUDA, generator) for _ in range(ROUTINGS)]
    return [Inputs(x, weights, experts, w13, w2, rank.first) for weights, experts in routings]


def grouped_candidates(rows: int) -> Iterable[moe_grouped.Config]:
    heights = [m for m in (16, 32, 64, 128) if rows // 2 <= m <= 4 * max(rows, 16)]
    return itertools.starmap(moe_grouped.Config, itertools.product(heights, (64, 128), (4, 8), (3, 4)))


def tune_grouped(sets: Sequence[Inputs], num_experts: int, samples: int) -> dict[str, object]:
    (num, top_k), quantised = sets[0].experts.shape, Operand(None, quant_groups(sets[0].x))
    rows = expected_rows(num, top_k, num_experts)
    used = moe_grouped.config(rows)

    def calls(config: moe_grouped.Config) -> list[Callable[[], Tensor]]:
        return [functools.partial(moe_grouped.run, quantised, *s[1:], shared_expert=False, config=config) for s in sets]

    times = _times(used, grouped_candidates(rows), calls, samples)
    return {"expected_rows": rows, "used_us": times[used], "both": _ranking(times)}


def _times(
    used: moe_grouped.Config,
    others: Iterable[moe_grouped.Config],
    calls: Callable[[moe_grouped.Config], list[Callable[[], Tensor]]],
    samples: int,
) -> dict[moe_grouped.Config, float]:
    """Microseconds, ascending; configurations that the GPU refuses take infinitely long."""
    times: dict[moe_grouped.Config, float] = {}
    for config in itertools.chain((used,), others):
        if config in times:
            continue
        try:
            times[config] = time_us(calls(config), CUDA, samples)
        except Exception as error:  # too much shared memory, say
            print(f"{config}: {type(error).__name__}")
            times[config] = float("inf")
    return dict(sorted(times.items(), key=lambda item: item[1]))


def _ranking(times: dict[moe_grouped.Config, float]) -> list[dict[str, float]]:
    return [{**config._asdict(), "us": round(us, 2)} for config, us in list(times.items())[:5]]


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune the experts' kernels.")
    parser.add_argument("--rank", nargs="+", default=["TP8", "EP8"], choices=["TP8", "EP8"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[32, 128, 512])
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    for rank, num in itertools.product([r for r in (TP8, EP8) if r.name in args.rank], args.tokens):
        sets, samples = inputs(rank, num), 3 if args.quick else 7
        rows.append({"rank": rank.name, "tokens": num, **tune_grouped(sets, rank.dims.experts, samples)})
        print(rows[-1], flush=True)
    print_record(Record("tune_moe", vars(args), {"rows": rows}))


if __name__ == "__main__":
    main()
