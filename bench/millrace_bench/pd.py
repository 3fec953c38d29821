"""Prefill and decode apart, against two unified workers, against prompts that the decode worker runs itself when they
are short: the same requests at the same moments to each, one system after the other.

    pair         1 prefill + 1 decode worker
    unified      2 unified workers
    conditional  as pair, with routing.local_prefill_tokens and routing.local_prefill_wait

millrace bench pd --worker-set device=cuda                         two GPUs: V3's widths, 32 experts, 61 layers
millrace bench pd --engine sim --worker-set sim.step_s=0.0145 sim.token_s=0.000085 sim.sequence_s=0.00026
millrace bench pd --widths tiny --layers 2 --loads 64/16@2,4 32/8x3@2 --seconds 3            on a CPU
millrace bench pd --preset k8s/golden/h200-3p-1d.yaml       instead: the workers and router that the chart would install

A load is INPUT/OUTPUT[xTURNS]@RATES: tokens, turns of a conversation, offered requests per second. Its first turn
begins at random moments (Poisson), a later one `--think-time` after the answer before it.
Exit code 1: a system did not start, did not end within its limit, or failed a request.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from millrace_cli.cluster import TINY, ClusterSpec, LocalCluster, StartError, count_gpus
from millrace_load import plots
from millrace_load.record import Record, print_record
from millrace_load.report import Report, Slo
from millrace_load.serving import collect
from millrace_load.serving_options import Settings
from rich.console import Console

from millrace_bench import preset, v3

Row = dict[str, Any]
PRESET = "preset"  # the topology of --preset
TOPOLOGIES = {"pair": (1, 1, 0), "unified": (0, 0, 2), "conditional": (1, 1, 0)}  # prefill, decode, unified workers
LOADS = ("4096/256@0.5,1,1.5,2", "1024/512@1,2,3,4", "500/100x5@1,2,4,6")
POLICIES = ("prefill_policy=kv_aware", "decode_policy=kv_aware")  # of all: conversations find what is cached
LOAD = re.compile(r"(\d+)/(\d+)(?:x(\d+))?@(\d[\d.]*(?:,\d[\d.]*)*)")
WAYS = re.compile(r'^millrace_placements_total\{.*?route="(\w+)".*?\} (\S+)$', re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Load:
    input_len: int  # new tokens of a turn
    output_len: int
    turns: int
    rates: tuple[float, ...]  # requests per second

    @classmethod
    def parse(cls, text: str) -> Load:
        """ "4096/256@0.5,1" or "500/100x5@2". ValueError with the accepted form."""
        found = LOAD.fullmatch(text)
        if found is None:
            raise ValueError(f"load {text!r} is not of the form INPUT/OUTPUT[xTURNS]@RATE,RATE")
        load = cls(int(found[1]), int(found[2]), int(found[3] or 1), tuple(map(float, found[4].split(","))))
        if not min(load.input_len, load.output_len, load.turns, *load.rates) > 0:
            raise ValueError(f"load {text!r}: lengths, turns and rates must be above 0")
        return load

    @property
    def name(self) -> str:
        turns = f", {self.turns} turns" if self.turns > 1 else ""
        return f"{self.input_len} in, {self.output_len} out{turns}"

    @property
    def longest(self) -> int:
        """Tokens of a whole conversation."""
        return self.turns * (self.input_len + self.output_len)

    def settings(self, rate: float, seed: int, address: str, args: argparse.Namespace) -> Settings:
        """So many conversations that they last `--seconds` at this rate; `--warmup` requests before the first rate."""
        return Settings(
            address=address,
            num_requests=max(round(rate * args.seconds / self.turns), 1),
            warmup=args.warmup if rate == self.rates[0] else 0,
            request_rate=rate / self.turns,
            input_len=str(self.input_len),
            output_len=str(self.output_len),
            multi_turn=self.turns,
            think_time=args.think_time,
            ignore_eos=True,
            seed=seed,
        )


def spec(topology: str, model: Path, args: argparse.Namespace) -> ClusterSpec:
    own = [f"limits.max_model_len={max(load.longest for load in args.loads)}"]
    if topology == PRESET:
        return _of_preset(model, args)
    prefill, decode, unified = TOPOLOGIES[topology]
    router = list(POLICIES)
    if topology == "conditional":
        router.append(f"routing.local_prefill_tokens={args.local_prefill_tokens}")
        router.append(f"routing.local_prefill_wait={args.local_prefill_wait}")
    if args.model is None and args.engine == "model":
        own.append("random_weights=true")
    return ClusterSpec(
        prefill=prefill,
        decode=decode,
        unified=unified,
        engine=args.engine,
        model=model,
        worker_set=(*own, *args.worker_set),
        router_set=(*router, *args.router_set),
    )


def _of_preset(model: Path, args: argparse.Namespace) -> ClusterSpec:
    """The settings that the chart would install, and no others unless they are asked for."""
    random = ["random_weights=true"] if args.model is None and args.engine == "model" else []
    found = preset.load(args.preset).scaled(args.gpus)
    made = found.spec((*random, *args.worker_set), model=model, engine=args.engine, gpus=args.gpus)
    return replace(made, router_set=(*made.router_set, *args.router_set))


async def measure(topology: str, model: Path, args: argparse.Namespace, rows: list[Row]) -> None:
    """One row of each load and rate, as soon as it is over. Every topology gets the same seeds."""
    async with LocalCluster(spec(topology, model, args)) as cluster, httpx.AsyncClient() as http:
        ways = await _ways(http, cluster.http_url)
        for seed, (load, rate) in enumerate(runs(args.loads), args.seed):
            run = await collect(load.settings(rate, seed, cluster.grpc_address, args), Console(quiet=True))
            before, ways = ways, await _ways(http, cluster.http_url)
            report = Report.of(run.samples, Slo.parse(args.slo)).as_dict()
            taken = {way: count - before.get(way, 0) for way, count in ways.items() if count > before.get(way, 0)}
            rows.append({"topology": topology, "load": load.name, "rate": rate, **report, "ways": taken})
            print(line(rows[-1]), flush=True)


def runs(loads: Sequence[Load]) -> Iterator[tuple[Load, float]]:
    return ((load, rate) for load in loads for rate in load.rates)


async def _ways(http: httpx.AsyncClient, url: str) -> dict[str, int]:
    """How the router has placed requests until now, those of the warm-up included: way → number."""
    found: dict[str, int] = {}
    for way, count in WAYS.findall((await http.get(f"{url}/metrics")).text):
        found[way] = found.get(way, 0) + round(float(count))
    return found


def line(row: Row) -> str:
    ttft, tpot = ([1e3 * (row[name][percentile]) for percentile in ("p50", "p99")] for name in ("ttft", "tpot"))
    return (
        f"{row['topology']:12} {row['load']:26} {row['rate']:5.2f}/s  goodput {row['goodput']:5.2f}/s"
        f"  TTFT {ttft[0]:6.0f} {ttft[1]:6.0f} ms  TPOT {tpot[0]:6.1f} {tpot[1]:6.1f} ms"
        f"  {row['ways']}" + (f"  failed {row['errors']}" if row["errors"] else "")
    )


def run(args: argparse.Namespace, folder: Path) -> Record:
    model = args.model or TINY
    if args.model is None and args.engine == "model":
        model = v3.write_folder(folder / args.widths, args.widths, args.layers)
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for topology in args.topologies:
        try:
            asyncio.run(asyncio.wait_for(measure(topology, model, args, rows), args.limit))
        except (TimeoutError, StartError, preset.PresetError) as error:
            failed[topology] = str(error) or f"not done after {args.limit:.0f} s"
            print(f"{topology:12} {failed[topology]}", flush=True)
    return Record("pd", vars(args), {"rows": rows, "failed": failed})


def main() -> None:
    args = parser().parse_args()
    if args.preset:
        args.topologies = [PRESET]
    with tempfile.TemporaryDirectory(prefix="millrace-pd-") as folder:
        record = run(args, Path(folder))
    results = record.results
    if args.plot and results["rows"]:
        plots.draw(plots.points({"bench": "pd", "results": results}), args.plot)
    print_record(record)
    sys.exit(int(bool(results["failed"]) or any(row["errors"] for row in results["rows"])))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="millrace bench pd", description="1P + 1D, two unified workers, conditional.")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=Path, help="checkpoint folder (default: random weights)")
    model.add_argument("--widths", choices=list(v3.WIDTHS), default="e32", help="of random weights")
    parser.add_argument("--layers", type=int, default=61, help="of them")
    parser.add_argument("--engine", choices=("model", "sim"), default="model", help="sim: a timing model")
    parser.add_argument("--topologies", nargs="+", choices=list(TOPOLOGIES), default=list(TOPOLOGIES))
    parser.add_argument("--preset", type=Path, help="instead: what the chart installs from this file")
    parser.add_argument("--gpus", type=int, default=count_gpus(), help="of a preset (%(default)s)")
    parser.add_argument("--loads", type=_load, nargs="+", default=[Load.parse(text) for text in LOADS])
    parser.add_argument("--seconds", type=float, default=40.0, help="for which a rate is offered")
    parser.add_argument("--warmup", type=int, default=8, help="uncounted requests before each load")
    parser.add_argument("--think-time", default="1", help="seconds, as bench serving")
    parser.add_argument("--local-prefill-tokens", type=int, default=512, help="conditional: shorter uncached prompts")
    parser.add_argument("--local-prefill-wait", type=float, default=0.25, help="conditional: seconds; 0: never")
    parser.add_argument("--slo", default="ttft=1,tpot=0.04", help="of goodput, seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of each system, its start included")
    parser.add_argument("--plot", type=_picture, help="write a picture to this file (.svg or .png)")
    parser.add_argument("--worker-set", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--router-set", nargs="*", default=[], metavar="KEY=VALUE")
    return parser


def _load(text: str) -> Load:
    try:
        return Load.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _picture(text: str) -> Path:
    try:
        plots.check(text)
    except plots.PlotError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(text)


if __name__ == "__main__":
    main()
