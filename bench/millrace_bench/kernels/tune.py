"""Times configurations of a decode step's kernels for 1, 4 and 16 tokens at V3's shapes: few-token products, experts
and attention. Prints the best beside the one in use, and the rows worth adding to `MEASURED` in
millrace_kernels/triton/small_linear.py; writes all times as JSON.

Processes compile every configuration ahead, for a part of the time: one that is not ready by then is left out, and so
are jobs that the time did not reach.

python -m millrace_bench.kernels.tune [--out FILE] [--seconds 70] [--only T=1]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any

from millrace_bench.common import Record, print_record
from millrace_bench.kernels.compile_ahead import compile_ahead
from millrace_bench.kernels.dense import EP8, TP8
from millrace_bench.kernels.numeric import rms_error
from millrace_bench.kernels.timing import time_us
from millrace_bench.kernels.tune_jobs import CUDA, Decode, Experts, Job, Linear

GAIN = 0.97  # a row is worth its line when it takes less than this part of the time
COMPILE_PART = 0.6  # of the time, at most
SAME = 2e-2  # rms error against the reference; BF16 results and a BF16 value between two products


def jobs() -> Iterator[Job]:
    """Most wanted first."""
    tp8, both = ([(p.n, p.k) for p in products] for products in (TP8, (*TP8, *EP8)))
    yield from (Linear(1, n, k) for n, k in tp8)
    yield from (Experts(1, down) for down in (False, True))
    yield from (Decode(batch, keys) for batch, keys in itertools.product((1, 4), (1024, 4096)))
    yield from (Linear(1, n, k) for n, k in dict.fromkeys(both) if (n, k) not in tp8)
    for num in (4, 16):
        yield from (Linear(num, n, k) for n, k in tp8)
        yield from (Experts(num, down) for down in (False, True))


def compile_all(wanted: Iterable[Job], until: float) -> set[Hashable]:
    """The keys that compiled before `until`."""
    tasks: dict[Hashable, Callable[[], None]] = {}
    for job in wanted:
        for option in job.options():
            tasks.setdefault(job.key(option), functools.partial(job.compile, option))
    return compile_ahead(tasks, until)


def tune(job: Job, ready: set[Hashable], until: float) -> dict[Any, float]:
    """Microseconds by configuration, the one in use first; wrong ones and those that fail are left out."""
    times: dict[Any, float] = {}
    expected = job.wanted()
    for option in job.options():
        if job.key(option) not in ready or time.monotonic() > until:
            continue
        try:
            calls = job.calls(option)
            error = rms_error(calls[0](), expected)
            assert error <= SAME, f"differs from the reference by {error:.1e}"
            times[option] = time_us(calls, CUDA, samples=3)
        except Exception as failure:  # too much shared memory, say
            print(f"{job}: {option}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
    return times


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
    parser = argparse.ArgumentParser(description="Tune the kernels of a small decode step.")
    parser.add_argument("--out", type=Path, help="a file for the JSON, rewritten after every job")
    parser.add_argument("--seconds", type=float, default=70.0, help="for everything")
    parser.add_argument("--only", default="", help="only jobs whose name contains this")
    args = parser.parse_args()
    start = time.monotonic()
    rows: list[dict[str, Any]] = []
    record = Record("tune", vars(args), {"rows": rows})  # its rows are still to come
    until = start + args.seconds
    wanted = [job for job in jobs() if args.only in str(job)]
    ready = compile_all(wanted, start + COMPILE_PART * args.seconds)
    print(f"compiled after {time.monotonic() - start:.0f} s", flush=True)
    for job in wanted:
        if time.monotonic() > until:
            print(f"no time left for {job}", flush=True)
            continue
        try:
            if times := tune(job, ready, until):
                rows.append(row(job, times))
        except Exception as failure:  # the other jobs are still worth their rows
            print(f"{job}: {type(failure).__name__}: {str(failure)[:200]}", flush=True)
        job.__dict__.pop("inputs", None)
        if args.out:
            args.out.write_text(record.to_json() + "\n")
    print_record(record)


if __name__ == "__main__":
    main()
