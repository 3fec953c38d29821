"""Times optimisations against the same work without them, for rows of docs/seeds.md that have no switch.

python -m millrace_bench.onoff                  all of them, on a GPU
python -m millrace_bench.onoff M2 A6            some
python -m millrace_bench.onoff --tiny           small shapes on a CPU: whether everything runs

Each row of the result is one shape: microseconds of a call (kernels, in CUDA graphs), or of a step (A11, A13 and the
rows of X), with and without, taken in one run on the same inputs; `error` is how far the two results are apart. A call
is timed as in `millrace bench kernels`.
"""

import gc
import math
import os
import time
from collections.abc import Iterator

import torch
from millrace_load.options import CommandLine
from millrace_load.record import Record, Row, print_record, printed

from millrace_bench import onoff_steps
from millrace_bench.kernels.__main__ import wake
from millrace_bench.kernels.driver import COLD_BYTES, MAX_SETS
from millrace_bench.kernels.timing import time_us
from millrace_bench.onoff_pairs import PAIRS, Pair, sizes

SEEDS = (*PAIRS, *onoff_steps.STEPS)


def measure(pair: Pair, device: torch.device, quick: bool) -> Row:
    """Inputs take turns, so that no call finds its bytes in the L2 cache."""
    sets = 1 if quick else max(1, min(MAX_SETS, math.ceil(COLD_BYTES / pair.nbytes)))
    made = [pair.make() for _ in range(sets)]
    samples = 3 if quick else 7
    on_us, off_us = (time_us([calls[index] for calls in made], device, samples) for index in (0, 1))
    return row(pair.seed, pair.shape, on_us, off_us, pair.difference(*made[0]))


def row(seed: str, shape: str, on_us: float, off_us: float, error: float) -> Row:
    figures = {"on_us": on_us, "off_us": off_us, "gain": off_us / on_us, "error": error}
    return {"seed": seed, "shape": shape, **{name: float(f"{value:.4g}") for name, value in figures.items()}}


def run(seeds: list[str], device: torch.device, tiny: bool, layers: int) -> Iterator[Row]:
    for seed in seeds:
        try:
            if seed in PAIRS:
                for pair in PAIRS[seed](sizes(tiny), device):
                    yield measure(pair, device, quick=tiny)
            else:
                for shape, on_us, off_us, error in onoff_steps.STEPS[seed](device, tiny, layers):
                    yield row(seed, shape, on_us, off_us, error)
        except Exception as error:  # of a library, or for want of memory: the other rows are still worth their time
            yield {"seed": seed, "failed": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()  # a model of this row is in the way of the next one's
        torch.cuda.empty_cache()


def main() -> None:
    parser = CommandLine("python -m millrace_bench.onoff", __doc__)
    parser.add_argument("seeds", nargs="*", metavar="ROW", help=f"rows: {' '.join(SEEDS)}; none: all")
    parser.add_argument("--tiny", action="store_true", help="small shapes on a CPU")
    parser.add_argument("--layers", type=int, default=61, help="layers of the rank whose steps are timed (X1 to X8)")
    args = parser.parse_args()
    if unknown := set(args.seeds) - set(SEEDS):
        parser.error(f"{' '.join(sorted(unknown))}: choose from {' '.join(SEEDS)}")
    if args.tiny:
        os.environ.setdefault("TRITON_INTERPRET", "1")  # some pairs are kernels that have no reference
    device = torch.device("cpu" if args.tiny else "cuda")
    if device.type == "cuda":
        wake(device)
    started = time.monotonic()
    rows = printed(run(args.seeds or list(SEEDS), device, args.tiny, args.layers))
    seconds = round(time.monotonic() - started, 1)
    print_record(Record("onoff", vars(args), {"rows": rows, "seconds": seconds}))


if __name__ == "__main__":
    main()
