"""Ranks of the 671B model that compute together, each on a GPU of its own: all layers, random FP8 weights.

A worker with attention of its own on every rank, and `--experts` experts in all: 64 on two ranks are the load of an EP8
rank, 32 experts and as many rows of each. Every rank runs the same step, as a CUDA graph replay (decode) or eagerly
(prefill). An exchange is a way of tokens to the experts of other ranks; `none` sends nothing and is what the rest of
the step takes (millrace_bench/shard.py), so the share of communication is 1 - none / exchange. A row is printed when it
is measured; stderr tells what each rank is at, and of a row that takes longer than `--limit-s` where its ranks stand.

millrace bench ranks --ranks 2 --exchange none gather peer --decode 128x4096 256x2048 --prefill 4x4096
millrace bench ranks --ranks 2 --exchange none gather --decode 2x100 --layers 2 --tiny       on a CPU: whether it runs
"""

import argparse
import faulthandler
import functools
import itertools
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from millrace_kernels.peer.sizes import row_bytes
from millrace_load.options import CommandLine, form
from millrace_load.record import Record, Row, print_record
from millrace_serve.engine.start.exchange import PEER_BYTES
from millrace_serve.model.checkpoint.random_weights import RandomWeights
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.experts.deepep import DeepEpExperts
from millrace_serve.model.experts.deepep_buffer import DeepEpBuffer, machines, refusal
from millrace_serve.model.experts.gather import GatherExperts
from millrace_serve.model.experts.routed import Implementation
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import FP8

from millrace_bench import v3
from millrace_bench.processes import Ranks
from millrace_bench.shard import FoldedExperts, measure, say


def deepep(config: ModelConfig, dims: ParallelDims, args: argparse.Namespace, device: torch.device) -> Implementation:
    most_rows = max((int(size.split("x")[0]) for size in args.decode), default=0)
    if why := refusal(config, dims, machines(dims), most_rows, fp8=True):
        raise ValueError(f"deepep: {why}")
    return functools.partial(DeepEpExperts, DeepEpBuffer(config, dims, args.experts // dims.world, most_rows, device))


def peer(config: ModelConfig, dims: ParallelDims, args: argparse.Namespace, device: torch.device) -> Implementation:
    from millrace_kernels.peer.exchange import Exchange  # needs Triton
    from millrace_serve.model.experts.peer import PeerExperts

    sizes = [(kind, tuple(map(int, size.split("x")))) for kind in ("decode", "prefill") for size in getattr(args, kind)]
    assert dims.dp_group is not None
    choices = config.num_experts_per_tok + 1
    fit = PEER_BYTES // dims.dp // row_bytes(config.hidden_size, choices, torch.bfloat16)
    most = min(fit, max(count if kind == "decode" else count * length for kind, (count, length) in sizes))
    exchange = Exchange(dims.dp_group, device, most, config.hidden_size, choices, torch.bfloat16)
    return functools.partial(PeerExperts, exchange)


EXCHANGES: dict[str, Callable[..., Implementation]] = {
    "none": lambda *setup: FoldedExperts,
    "gather": lambda *setup: GatherExperts,
    "deepep": deepep,
    "peer": peer,
}


def build(dims: ParallelDims, exchange: str, args: argparse.Namespace, device: torch.device) -> DeepseekV3:
    widths: dict[str, Any] = {**v3.V3, **(v3.TINY if args.tiny else {}), "n_routed_experts": args.experts}
    config = ModelConfig(num_hidden_layers=args.layers, **widths)
    weights = RandomWeights(device, torch.bfloat16, FP8)
    return DeepseekV3(weights, config, dims, experts=EXCHANGES[exchange](config, dims, args, device))


def measured(dims: ParallelDims, device: torch.device, exchange: str, args: argparse.Namespace) -> list[Row]:
    """Of this rank, each with the time of the slowest one. Rank 0 prints each row when it is measured."""
    who = f"rank {dims.rank}, {exchange}: "
    say(f"{who}makes the model")
    model = build(dims, exchange, args, device)
    rows = []
    for kind, sizes in (("decode", args.decode), ("prefill", args.prefill)):
        for size, kv_dtype in itertools.product(sizes, args.kv_dtype):
            count, length = map(int, size.split("x"))
            faulthandler.dump_traceback_later(args.limit_s, exit=True)
            dist.barrier()
            row = measure(model, kind, count, length, kv_dtype, args, who)
            rows.append(slowest(dims, row | {"exchange": exchange, "ranks": args.ranks}))
            faulthandler.cancel_dump_traceback_later()
            if dims.rank == 0:
                print({key: value for key, value in rows[-1].items() if not key.startswith("kernels")}, flush=True)
            torch.cuda.empty_cache()
    return rows


def slowest(dims: ParallelDims, row: Row) -> Row:
    """Of all ranks: every rank waits for it. Collective."""
    rows: list[Row] = [json.loads(of_rank) for of_rank in dims.exchange(json.dumps(row).encode())]
    return max(rows, key=lambda row: row["ms"])


def run(exchange: str, args: argparse.Namespace) -> list[Row]:
    """One set of processes."""
    return Ranks(args.ranks, "cpu" if args.tiny else "cuda", timeout_s=600.0).run(measured, exchange, args)[0]


def shares(rows: list[Row]) -> None:
    """Adds the share of communication to the rows of a size that was measured without, too."""
    alone = {_size(row): row["ms"] for row in rows if row["exchange"] == "none"}
    for row in rows:
        if _size(row) in alone:
            row["communication"] = round(1 - alone[_size(row)] / row["ms"], 4)


def _size(row: Row) -> tuple[Any, ...]:
    return row["kind"], row["count"], row["length"], row["kv_dtype"]


def main() -> None:
    parser = CommandLine("millrace bench ranks", "Ranks of the 671B model that compute together.")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--exchange", nargs="+", default=["none", "gather"], choices=sorted(EXCHANGES))
    parser.add_argument("--experts", type=int, default=64, help="experts of the model")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--decode", nargs="*", default=[], **form("BATCHxCONTEXT", keep=True), help="for each rank")
    parser.add_argument("--prefill", nargs="*", default=[], **form("PROMPTSxLENGTH", keep=True), help="for each rank")
    parser.add_argument("--kv-dtype", nargs="+", default=["bfloat16"], choices=["bfloat16", "float8_e4m3fn"])
    parser.add_argument("--tiny", action="store_true", help="small widths on a CPU, to see that it runs")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds of a row, else ranks print stacks")
    parser.add_argument("--profile", action="store_true", help="one more step under the profiler, by kernel")
    args = parser.parse_args()
    args.shard = f"{args.experts} experts"
    rows = []
    for exchange in args.exchange:
        rows += run(exchange, args)
    shares(rows)
    print_record(Record("ranks", vars(args), {"rows": rows}))


if __name__ == "__main__":
    main()
