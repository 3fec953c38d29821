"""Times configurations of the few-token products and experts of a decode step: 1, 2, 4 and 16 tokens, V3's shapes.

Prints the best beside the one in use, and the rows worth adding to `small_linear.MEASURED`.

python -m millrace_bench.kernels.tune [--out FILE] [--seconds 70] [--only T=1]
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from millrace_bench.kernels.dense import EP8, TP8
from millrace_bench.kernels.tune_jobs import CUDA, Experts, Job, Linear
from millrace_bench.kernels.tuning import Run, parser, times_of

GAIN = 0.97  # a row is worth its line when it takes less than this part of the time
COMPILE_PART = 0.6  # of the time, at most
SAME = 2e-2  # rms error against the reference; BF16 results and a BF16 value between two products


def jobs() -> Iterator[Job]:
    """Most wanted first."""
    tp8, both = ([(p.n, p.k) for p in products] for products in (TP8, (*TP8, *EP8)))
    yield from (Linear(1, n, k) for n, k in tp8)
    yield from (Experts(1, down) for down in (False, True))
    yield from (Linear(1, n, k) for n, k in dict.fromkeys(both) if (n, k) not in tp8)
    for num in (2, 4, 16):
        yield from (Linear(num, n, k) for n, k in tp8)
        yield from (Experts(num, down) for down in (False, True))


def tune(job: Job, ready: set[Hashable], is_over: Callable[[], bool]) -> dict[Any, float]:
    options = [option for option in job.options() if job.key(option) in ready]
    return times_of(job, options, job.calls, CUDA, wanted=job.wanted(), same=SAME, is_over=is_over)


def row(job: Job, times: dict[Any, float]) -> dict[str, Any]:
    used, ranked = job.options()[0], sorted(times, key=lambda option: times[option])
    best = ranked[0]
    speed = {option: job.nbytes / times[option] / 1e6 for option in times}  # TB/s
    in_use = f"{times[used]:.2f} us, {speed[used]:.2f} TB/s with {used}" if used in times else f"no time of {used}"
    print(f"{job}: {times[best]:.2f} us, {speed[best]:.2f} TB/s with {best}; in use: {in_use}", flush=True)
    if isinstance(job, Linear) and times[best] < GAIN * times.get(used, float("inf")):
        print(f"    ({job.num}, {job.n}, {job.k}): {best!r},  # {times[best]:.1f} us", flush=True)
    listed = [[repr(option), round(times[option], 2), round(speed[option], 2)] for option in ranked]
    return {"job": str(job), "used": repr(used), "us_and_tb_per_s": listed}


def main() -> None:
    options = parser("Tune the kernels of a small decode step.", 70.0)
    options.add_argument("--only", default="", help="only jobs whose name contains this")
    args = options.parse_args()
    run = Run("tune", args)
    wanted = [job for job in jobs() if args.only in str(job)]
    compiled = ((job.key(o), functools.partial(job.compile, o)) for job in wanted for o in job.options())
    ready = run.compile(compiled, COMPILE_PART)

    def measure(job: Job) -> dict[str, Any] | None:
        try:
            times = tune(job, ready, lambda: run.is_over)
            return row(job, times) if times else None
        finally:
            job.__dict__.pop("inputs", None)

    run.measure(wanted, measure)


if __name__ == "__main__":
    main()
