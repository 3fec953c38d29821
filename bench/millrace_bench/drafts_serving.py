"""Drafts in a whole system, as a client sees them: router, prefill worker and decode worker, one system after the other
for each number of drafts. Weights are random, so how many drafts are accepted is drawn.

    tpot_ms   per token after the first; ttft_ms until the first
    accept    tokens that a step gave, drawn: 1 without drafts; step_ms of such a step, by both
    speedup   of the time per token, to the first system

python -m millrace_bench.drafts_serving --widths e32 --layers 61 --worker-set device=cuda
python -m millrace_bench.drafts_serving --widths tiny --layers 2 --input-len 64 --output-len 24        on a CPU

Exit code 1: a system did not start, did not end within its limit, or failed a request.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path

from millrace_cli.cluster import ClusterSpec, LocalCluster, StartError
from millrace_load.record import Record, Row, print_record
from millrace_load.report import Report, Slo
from millrace_load.serving import collect
from millrace_load.serving_options import Settings
from rich.console import Console

from millrace_bench import v3
from millrace_bench.engine import ACCEPTANCE


def main() -> None:
    args = parser().parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-drafts-") as folder:
        model = v3.write_folder(Path(folder) / args.widths, args.widths, args.layers)
        rows: list[Row] = []
        for drafts in args.drafts:
            row = asyncio.run(_within_limit(_spec(model, drafts, args), drafts, args))
            rows.append(row)
            if "tpot_ms" in row and "tpot_ms" in rows[0]:
                row["speedup"] = round(rows[0]["tpot_ms"] / row["tpot_ms"], 3)
            print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
    print_record(Record("drafts_serving", vars(args), {"rows": rows}))
    sys.exit(int(any(row.get("error") for row in rows)))


def _spec(model: Path, drafts: int, args: argparse.Namespace) -> ClusterSpec:
    """A prefill and a decode worker, each on its own GPU where there are two."""
    length, clients = args.input_len + args.output_len, args.concurrency
    own = [
        "random_weights=true",
        f"limits.max_model_len={length}",
        f"limits.max_running={clients}",
        f"limits.draft_tokens={drafts}",
        f"limits.draft_batches={[clients] * drafts}",
        f"simulated_acceptance={list(args.acceptance[:drafts])}",
    ]
    return ClusterSpec(model=model, worker_set=(*own, *args.worker_set), start_timeout_s=args.limit)


async def _within_limit(spec: ClusterSpec, drafts: int, args: argparse.Namespace) -> Row:
    try:
        async with asyncio.timeout(args.limit):
            return {"drafts": drafts, **await _measure(spec, drafts, args)}
    except (TimeoutError, StartError) as error:
        return {"drafts": drafts, "error": str(error) or f"not done after {args.limit:.0f} s"}


async def _measure(spec: ClusterSpec, drafts: int, args: argparse.Namespace) -> Row:
    started = time.monotonic()
    async with LocalCluster(spec) as cluster:
        ready_s = time.monotonic() - started
        settings = Settings(
            address=cluster.grpc_address,
            num_requests=args.num_requests,
            warmup=args.concurrency,
            concurrency=args.concurrency,
            input_len=str(args.input_len),
            output_len=str(args.output_len),
            ignore_eos=True,
        )
        run = await collect(settings, Console(quiet=True))
    report = Report.of(run.samples, Slo())
    row: Row = {"ready_s": round(ready_s, 1), "completed": report.completed}
    row |= {"ttft_ms": round(1e3 * report.ttft.p50, 2), "tpot_ms": round(1e3 * report.tpot.p50, 3)}
    accept = 1 + drafts * report.accepted_tokens / max(report.drafted_tokens, 1)
    row |= {"accept": round(accept, 3), "step_ms": round(row["tpot_ms"] * accept, 3)}
    return row | ({"error": str(report.errors)} if report.errors else {})


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Drafts in a whole system, as a client sees them.")
    parser.add_argument("--widths", choices=list(v3.WIDTHS), default="e32")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 2, 3], choices=range(4))
    parser.add_argument("--acceptance", type=float, nargs=3, default=ACCEPTANCE, metavar="P", help="as bench engine")
    parser.add_argument("--input-len", type=int, default=4096, help="tokens of a prompt")
    parser.add_argument("--output-len", type=int, default=256, help="tokens of an answer")
    parser.add_argument("--concurrency", type=int, default=1, help="clients, each with one request at a time")
    parser.add_argument("--num-requests", type=int, default=5, help="counted requests")
    parser.add_argument("--limit", type=float, default=250.0, help="seconds of each system, its start included")
    parser.add_argument("--worker-set", nargs="*", default=[], metavar="KEY=VALUE")
    return parser


if __name__ == "__main__":
    main()
