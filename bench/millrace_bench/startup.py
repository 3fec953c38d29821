"""From the start of a worker's process to READY: with empty caches of compiled code, and again with what that left.

    ready_s   the whole, and the seconds of each phase (docs/explanation/start.md)

Weights are random, so nothing is read from a disk; `tp8` has the shapes of one of 8 tensor-parallel ranks of the 671B
model, all 61 layers of which fit on one H200.

millrace bench startup --widths tp8 --layers 61 --device cuda
millrace bench startup --widths tiny --layers 2                        on a CPU: whether everything runs
"""

import asyncio
import tempfile
from pathlib import Path

from millrace_cli import probe
from millrace_cli.cluster import ClusterSpec, LocalCluster
from millrace_load.options import SET, CommandLine
from millrace_load.record import Record, Row, print_record, print_row
from millrace_serve.worker import caches

from millrace_bench import v3

WORKER = "unified-0"


async def start(spec: ClusterSpec) -> Row:
    """One worker beside a router that has nothing to wait for but it. StartError when it does not come up."""
    async with LocalCluster(spec) as cluster:
        info = await probe.worker_info(cluster.address(WORKER))
        assert info is not None, "a worker that is ready answers"
        seconds = cluster.processes[WORKER].seconds
        return {"ready_s": round(seconds, 2), "phases": {k: round(v, 2) for k, v in info.startup_seconds.items()}}


def main() -> None:
    parser = CommandLine("millrace bench startup", "From start to READY, cold and warm.")
    parser.add_argument("--widths", choices=list(v3.WIDTHS), required=True)
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--worker-set", nargs="*", **SET)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-startup-") as folder:
        model, cache = v3.write_folder(Path(folder) / args.widths, args.widths, args.layers), Path(folder) / "cache"
        own = (f"device={args.device}", "random_weights=true", f"cache_dir={cache}", *args.worker_set)
        spec = ClusterSpec(prefill=0, decode=0, unified=1, model=model, worker_set=own)
        rows: list[Row] = []
        for name in ("cold", "warm"):
            rows.append(print_row(caches=name, **asyncio.run(start(spec)), files=_files(cache)))
    print_record(Record("startup", vars(args), {"rows": rows}))


def _files(cache: Path) -> dict[str, int]:
    """That each compiler has left so far."""
    return {name: count for name, (count, _) in caches.sizes(cache).items() if count}


if __name__ == "__main__":
    main()
