"""Times configurations of our kernels on all GPUs of this host, and writes the file of this kind of GPU
(`millrace_kernels.tuned`). Prints each job's best beside the one in use.

python -m millrace_bench.kernels.tune --all                      every kind, 900 seconds
python -m millrace_bench.kernels.tune mid moe --match "EP8 step"  those jobs of two kinds whose names contain this
    [--seconds 300] [--folder DIR] [--out FILE]

Several GPUs share the jobs, through Ray. Most kernels of attention have no table: a reader moves their winners into the
kernels' defaults.
"""

import functools
import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import triton
from millrace_kernels import tuned
from millrace_kernels.gpu import Gpu, gpu
from millrace_load.options import CommandLine, output
from millrace_load.record import Record, print_record, versions

from millrace_bench.kernels import tuned_file
from millrace_bench.kernels.tuning import Clock, Found, Job, run

# Kind -> module with `jobs()`, most wanted first.
KINDS = {
    "few": "tune_few",  # few-token products
    "mid": "tune_mid",  # FP8 products of 17 to 256 tokens, beside DeepGEMM
    "moe": "tune_moe",  # grouped experts, beside DeepGEMM and the few-token kernels
    "attention": "tune_attention",  # attention's own kernels; the absorbed form's products beside cuBLAS
}
MOST_PROCESSES = 16  # that compile, in all


def jobs(kinds: Sequence[str], match: str = "") -> list[Job]:
    found = [job for kind in kinds for job in importlib.import_module(f"millrace_bench.kernels.{KINDS[kind]}").jobs()]
    return [job for job in found if match in str(job)]


def share(
    kinds: Sequence[str], match: str, seconds: float, index: int, gpus: int, keep: Callable[[Found], None] | None = None
) -> tuple[Gpu, list[Found]]:
    """Every `gpus`-th job, on this process's GPU."""
    found: list[Found] = []
    processes = max(min(len(os.sched_getaffinity(0)), MOST_PROCESSES) // gpus, 1)
    run(jobs(kinds, match)[index::gpus], Clock(seconds), processes, keep or found.append)
    return gpu(), found


def over_gpus(task: Callable[[int], Any], gpus: int) -> list[Any]:
    """`task(index)` of each GPU, where it is the only one that is visible."""
    import ray

    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "120")  # on busy cores Ray's 30 s are too short
    ray.init("local", num_cpus=1, num_gpus=gpus, include_dashboard=False, _node_ip_address="127.0.0.1")
    try:
        remote = ray.remote(num_gpus=1, num_cpus=0)(task)
        return ray.get([remote.remote(index) for index in range(gpus)])
    finally:
        ray.shutdown()


def main() -> None:
    parser = CommandLine("python -m millrace_bench.kernels.tune", "Tune our kernels for this kind of GPU.")
    parser.add_argument("kinds", nargs="*", help=f"kinds: {', '.join(KINDS)}")
    parser.add_argument("--all", action="store_true", help="every kind")
    parser.add_argument("--match", default="", help="only jobs whose name contains this")
    parser.add_argument("--seconds", type=float, default=900.0, help="begin no further job after this time")
    parser.add_argument("--folder", type=Path, default=tuned.FOLDER, help="folder of the GPU's file")
    parser.add_argument("--out", type=output, help="write all times to this file as JSON")
    args = parser.parse_args()
    kinds = list(KINDS) if args.all else args.kinds
    if not kinds or not set(kinds) <= set(KINDS):
        parser.error(f"name kinds of kernels out of {', '.join(KINDS)}, or --all")
    gpus = torch.cuda.device_count()
    if not gpus:
        parser.error("no GPU is visible")
    rows: list[dict[str, Any]] = []
    record = Record("tune", vars(args), {"rows": rows})

    def keep(here: Gpu, found: Sequence[Found]) -> None:
        rows.extend(one.row for one in found)
        entries = [entry for one in found for entry in one.entries]
        if entries:
            tuned_file.update(here, entries, versions().get("commit", ""), triton.__version__, args.folder)
        if args.out:
            args.out.write_text(record.to_json() + "\n", encoding="utf-8")

    measure = functools.partial(share, kinds, args.match, args.seconds)
    if gpus > 1:
        for here, found in over_gpus(lambda index: measure(index, gpus), gpus):
            keep(here, found)
    else:
        measure(0, 1, lambda one: keep(gpu(), [one]))
    print_record(record)


if __name__ == "__main__":
    main()
