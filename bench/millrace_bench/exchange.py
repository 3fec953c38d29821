"""The way of rows to experts on other ranks and back, without the experts: our exchange and its rivals.

    dispatch, both      our kernels (millrace_kernels/peer/exchange.py): there, and there and back
    both_norm           the same and the next layer's norm, as in a model
    gather              NCCL: all-gather of BF16 rows, weights and ids; reduce-scatter (model/experts/gather.py)
    all_reduce          the same with an all-reduce, of which each rank keeps its own rows
    symm                the same with torch's symmetric memory, rows alone
    deepep_ll           DeepEP's low-latency mode, up to 256 rows
    deepep              DeepEP's normal mode; _graph: in a graph, as the others are

A process per GPU, 32 experts of each, 8 of them per row, uniform. Microseconds of one call in a CUDA graph of 20 calls
back to back, of the slowest rank. `right`: our sums are those of experts that multiply a row by their rank + 1.
`poll_us` is what a poll of a rank costs that waits for another one. Every family of ways has processes of its own: one
that fails or hangs is a row with an `error`. Each row is printed when it is known.

millrace bench exchange --ranks 2
millrace bench exchange --ranks 2 --rows 128 --few 16 --families ours gather        uneven ranks
"""

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import torch
from millrace_load.options import CommandLine
from millrace_load.record import Record, Row, print_record, printed
from millrace_serve.model.parallel import ParallelDims
from torch import multiprocessing

from millrace_bench import exchange_ways
from millrace_bench.exchange_ways import HELD, TOP_K, Call, Case, Ours
from millrace_bench.processes import Ranks, call_us, spawn

ROWS = (1, 8, 32, 64, 128, 256, 512, 1024, 4096)


def case(num: int, dims: ParallelDims, args: argparse.Namespace, device: torch.device) -> Case:
    """`num` rows of each rank, or of the first one."""
    counts = [num, *[args.few or num] * (dims.dp - 1)]
    num = counts[dims.rank]
    rng, experts = torch.Generator().manual_seed(100 * num + dims.rank), HELD * dims.dp
    x = torch.randn(num, args.width, generator=rng).bfloat16().to(device)
    ids = torch.rand(num, experts, generator=rng).topk(TOP_K).indices.int().to(device)
    return Case(dims, x, torch.rand(num, TOP_K, generator=rng).to(device), ids, experts, counts)


def timed(call: Call, graph: bool, args: argparse.Namespace, device: torch.device) -> Row:
    return {"us": round(call_us(call, args.repeats, device, graph), 2), "graph": graph}


def ours(args: argparse.Namespace, dims: ParallelDims, device: torch.device) -> Iterator[Row]:
    one = Ours(args, dims, device)
    for num in args.rows:
        given = case(num, dims, args, device)
        yield {"way": "right", "rows": num, "right": one.right(given)}
        ways = one.ways(given)
        if args.few:
            ways |= {f"{way}_padded": call for way, call in one.ways(given.padded()).items()}
        for way, call in ways.items():
            yield {"way": way, "rows": num, **timed(call, True, args, device)}
    assert one.exchange.error.item() == 0, "a rank did not answer"
    yield {"way": "poll", "rows": 0, "us": one.poll_us()}


def other(
    ways: Callable[[Case], Mapping[str, Call]],
    suffix: str,
    args: argparse.Namespace,
    dims: ParallelDims,
    device: torch.device,
) -> Iterator[Row]:
    """suffix: of names; "_eager" is without a graph."""
    for num in args.rows:
        for way, call in ways(case(num, dims, args, device).padded()).items():
            yield {"way": way + suffix, "rows": num, **timed(call, suffix != "_eager", args, device)}


FAMILIES: dict[str, Callable[[argparse.Namespace, ParallelDims, torch.device], Iterator[Row]]] = {
    "ours": ours,
    "gather": functools.partial(other, exchange_ways.gather, ""),
    "deepep_ll": functools.partial(other, exchange_ways.deepep_ll, ""),
    "deepep_eager": functools.partial(other, exchange_ways.deepep, "_eager"),
    "deepep": functools.partial(other, exchange_ways.deepep, ""),
    "symm": functools.partial(other, exchange_ways.symm, ""),
}


def measure(family: str, args: argparse.Namespace, dims: ParallelDims, device: torch.device) -> Iterator[Row]:
    """The rows that all ranks have, with the slowest's time, until one rank fails. Collective."""
    rows = FAMILIES[family](args, dims, device)
    while True:
        try:
            row = next(rows, None)
        except Exception as error:  # of a library, of CUDA, of memory: the others are told
            row = {"way": family, "error": f"{type(error).__name__}: {error}"[:300]}
        of_ranks = [row for data in dims.exchange(json.dumps(row).encode()) if (row := json.loads(data))]
        if not of_ranks:
            return
        slowest = max(of_ranks, key=lambda row: ("error" in row, row.get("us", 0.0), not row.get("right", True)))
        yield slowest
        if "error" in slowest:
            return


def rank_main(rank: int, family: str, folder: str, args: argparse.Namespace) -> None:
    """Prints the rows of `measure`, and appends them to a file of the folder."""
    dims, device = Ranks(args.ranks, "cuda" if torch.cuda.is_available() else "cpu").join(rank, folder)
    for row in measure(family, args, dims, device):
        if rank == 0:
            print(line := json.dumps(row), flush=True)
            with (Path(folder) / "rows").open("a") as rows:
                rows.write(line + "\n")


def run(family: str, args: argparse.Namespace, seconds: float) -> list[Row]:
    """The rows of a set of processes, which has so many seconds."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = spawn(args.ranks, rank_main, family, folder, args, join=False)
        end, error = time.monotonic() + seconds, ""
        try:
            while not ranks.join(timeout=1.0):
                if time.monotonic() > end:
                    raise TimeoutError(f"it was not over after {seconds:.0f} s")
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException, TimeoutError) as why:
            error = f"{why}"[-300:]
            for process in ranks.processes:
                process.kill()
        file = Path(folder) / "rows"
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [*rows, {"way": family, "error": error}] if error else rows


def main() -> None:
    parser = CommandLine("millrace bench exchange", "Rows to the experts of other ranks and back.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS), help="rows of each rank")
    parser.add_argument("--few", type=int, help="rows of all ranks but the first; padded, and ours uneven too")
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--polls", type=int, default=200_000)
    parser.add_argument("--families", nargs="+", default=list(FAMILIES), choices=list(FAMILIES))
    parser.add_argument("--seconds", type=float, default=90.0, help="for all families; each at most a third")
    args = parser.parse_args()
    rows, end = [], time.monotonic() + args.seconds
    for family in args.families:
        rows += printed(run(family, args, min(args.seconds / 3, end - time.monotonic())))
    wrong = [row["rows"] for row in rows if not row.get("right", True)]
    print(f"wrong sums: {wrong} rows" if wrong else "all sums are right")
    print_record(Record("exchange", vars(args), {"rows": rows}))


if __name__ == "__main__":
    main()
