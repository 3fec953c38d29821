"""Times every configuration of a few-token product at V3's shapes; prints those that beat the one in use, as the rows
of `MEASURED` in millrace_kernels/triton/small_linear.py, and all times as a JSON line.

python -m millrace_bench.kernels.tune [--tokens 1 4 16] [--quick]
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Iterator

import torch
from millrace_kernels.fp8 import BLOCK, quant_blocks
from millrace_kernels.testing.timing import time_us
from millrace_kernels.triton.small_linear import Config, config, small_linear_with

from millrace_bench.common import Record, print_record
from millrace_bench.kernels.case import Case
from millrace_bench.kernels.dense import EP8, TP8
from millrace_bench.kernels.driver import num_sets

TOKENS = (1, 4, 16)
GAIN = 0.97  # a row is worth its line when it takes less than this part of the time


def candidates(num_tokens: int, k: int) -> Iterator[Config]:
    """What fits the shape: a product for one token cuts its rows into BLOCK_K columns, one for more takes a block."""
    if num_tokens == 1:
        for block_n, block_k, warps, stages in itertools.product((2, 4, 8, 16), (512, 1024), (4, 8), (3, 5)):
            if block_k <= max(k, 512) and block_n * block_k >= 16 * 32 * warps:  # every lane loads 16 bytes
                yield Config(block_n, block_k, 1, warps, stages)
        return
    for block_n, splits, stages in itertools.product((32, 64, 128), (1, 2, 3, 4, 8), (4, 6)):
        if splits <= max(k // BLOCK // 2, 1):
            yield Config(block_n, BLOCK, splits, 8 if block_n == 128 else 4, stages)


def tune(num_tokens: int, n: int, k: int, samples: int) -> dict[Config, float]:
    """Microseconds of each configuration, ascending; those that the GPU refuses are left out."""
    device = torch.device("cuda")
    moved = Case("fp8.small_linear", "", dict, n * k, 0)
    weights = [quant_blocks(torch.randn(n, k, device=device)) for _ in range(num_sets(moved, device, quick=False))]
    x, times = torch.randn(num_tokens, k, device=device, dtype=torch.bfloat16), {}
    for chosen in {config(num_tokens, n, k): None} | dict.fromkeys(candidates(num_tokens, k)):
        try:
            times[chosen] = time_us(
                [functools.partial(small_linear_with, x, w, chosen) for w in weights], device, samples
            )
        except Exception as error:  # too much shared memory, say
            print(f"{chosen}: {type(error).__name__}")
    return dict(sorted(times.items(), key=lambda item: item[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description="Tune the few-token FP8 product.")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS), choices=TOKENS)
    parser.add_argument("--quick", action="store_true", help="fewer samples")
    args = parser.parse_args()
    rows = []
    for num, (n, k) in itertools.product(args.tokens, dict.fromkeys((p.n, p.k) for p in (*TP8, *EP8))):
        times = tune(num, n, k, samples=3 if args.quick else 7)
        best, now = next(iter(times)), config(num, n, k)
        used = times.get(now, float("inf"))
        rows.append({"tokens": num, "n": n, "k": k, "us": used, "best_us": times[best], "best": best._asdict()})
        if times[best] < GAIN * used:
            print(f"    ({num}, {n}, {k}): {best!r},  # {times[best]:.1f} us, was {used:.1f}", flush=True)
    print_record(Record("tune", vars(args), {"rows": rows}))


if __name__ == "__main__":
    main()
