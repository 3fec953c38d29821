"""Splits of the same GPUs into prefill, decode, unified and flexible workers, before the same requests at the same
moments, one system after the other.

    3p+1d      3 prefill workers and 1 decode worker
    4u         4 unified workers
    4flex      4 workers whose duties the router changes

millrace bench pd --topologies 3p+1d 2p+2d 4u 4flex --worker-set device=cuda          V3's widths, 32 experts, 61 layers
millrace bench pd --topologies 1p+1d 2u --engine sim --worker-set sim.step_s=0.0145 sim.token_s=0.000085
millrace bench pd --topologies 2u --widths tiny --layers 2 --loads 64/16@2,4 32/8x3@2 --seconds 3            on a CPU
millrace bench pd --topologies 4flex --changing 4096/256@7.5 1024/512@20 500/100x5@24 --every 30 --rounds 2
millrace bench pd --preset k8s/golden/h200-3p-1d.yaml       instead: the workers and router that the chart would install

A load is INPUT/OUTPUT[xTURNS]@RATES: tokens, turns of a conversation, offered requests per second. Its first turn
begins at random moments (Poisson), a later one `--think-time` after the answer before it. `--changing` sends loads one
after the other without a pause. goodput: requests that are due within a load's time and meet the limits, each second.
Exit code 1: a system did not start, did not end within its limit, or failed a request.
"""

import argparse
import asyncio
import math
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
from millrace.v1 import worker_pb2
from millrace_cli import probe
from millrace_cli.cluster import TINY, ClusterSpec, LocalCluster, StartError, count_gpus
from millrace_load import plots, serving_options
from millrace_load.options import SET, CommandLine, checkpoint, file, number, reader
from millrace_load.record import Record, Row, print_record
from millrace_load.report import Slo
from millrace_rpc.enums import name_of

from millrace_bench import preset, v3
from millrace_bench.pd_load import Clients, Load, Segment, by_second, changing, windowed

PRESET = "preset"  # the topology of --preset
ROLES = {"p": "prefill", "d": "decode", "u": "unified", "flex": "flexible"}
LOADS = ("4096/256@0.5,1,1.5,2", "1024/512@1,2,3,4", "500/100x5@1,2,4,6")
POLICIES = ("prefill_policy=kv_aware", "decode_policy=kv_aware")  # of all: conversations find what is cached
WAYS = re.compile(r'^millrace_placements_total\{.*?route="(\w+)".*?\} (\S+)$', re.MULTILINE)
QUEUED = re.compile(r"^millrace_queue_requests(?:\{.*?\})? (\S+)$", re.MULTILINE)
POLL_S = 1.0
SLO = "ttft=1,tpot=0.04"
TIMES = ("ttft", "tpot", "icl")


def workers(topology: str) -> dict[str, int]:
    """ "3p+1d": role to number of workers. ValueError with the accepted form."""
    counts: Counter[str] = Counter()
    for part in topology.split("+"):
        found = re.fullmatch(rf"(\d+)({'|'.join(ROLES)})", part)
        if found is None or not int(found[1]) or ROLES[found[2]] in counts:
            kinds = ", ".join(f"{short} {role}" for short, role in ROLES.items())
            raise ValueError(f"topology {topology!r} is not of the form 3p+1d, 4u or 4flex, each kind once: {kinds}")
        counts[ROLES[found[2]]] = int(found[1])
    if ("prefill" in counts) != ("decode" in counts):
        raise ValueError(f"topology {topology!r}: prefill workers need decode workers, and these need prefill workers")
    return dict(counts)


def spec(topology: str, model: Path, args: argparse.Namespace) -> ClusterSpec:
    if topology == PRESET:
        return _of_preset(model, args)
    own = [f"limits.max_model_len={max(load.longest for load in args.changing or args.loads)}"]
    if args.model is None and args.engine == "model":
        own.append("random_weights=true")
    counts: dict[str, Any] = {**dict.fromkeys(ROLES.values(), 0), **workers(topology)}
    return ClusterSpec(
        **counts,
        engine=args.engine,
        model=model,
        worker_set=(*own, *args.worker_set),
        router_set=(*POLICIES, *limits(args.slo), *args.router_set),
        routers=args.routers,
    )


def limits(slo: str) -> list[str]:
    """What the router is told of the objective, for all topologies."""
    found = Slo.parse(slo)
    pairs = (("ttft", found.ttft), ("tpot", found.tpot))
    return [f"routing.slo.{name}={limit}" for name, limit in pairs if limit is not None]


def _of_preset(model: Path, args: argparse.Namespace) -> ClusterSpec:
    """The settings that the chart would install, and no others unless they are asked for."""
    random = ["random_weights=true"] if args.model is None and args.engine == "model" else []
    found = preset.load(Path(args.preset)).scaled(args.gpus)
    made = found.spec((*random, *args.worker_set), model=model, engine=args.engine, gpus=args.gpus)
    return replace(made, router_set=(*made.router_set, *args.router_set), routers=args.routers)


async def measure(topology: str, model: Path, args: argparse.Namespace, rows: list[Row]) -> None:
    """One row of each load and rate, or of each segment and the whole, as soon as it is over. Every topology gets the
    same seeds.
    """
    async with LocalCluster(spec(topology, model, args)) as cluster, httpx.AsyncClient() as http:
        system = System(topology, cluster, http, args)
        if args.changing:
            await system.change(changing(args.changing, args.every, args.rounds, args.seed), rows)
            return
        runs = ((load, rate) for load in args.loads for rate in load.rates)
        for seed, (load, rate) in enumerate(runs, args.seed):
            warmup = args.warmup if rate == load.rates[0] else 0
            await system.steady(Segment(load, rate, args.seconds, seed), warmup, rows)


class System:
    """One topology that runs."""

    def __init__(self, topology: str, cluster: LocalCluster, http: httpx.AsyncClient, args: argparse.Namespace) -> None:
        self.topology, self._cluster, self._http, self._slo = topology, cluster, http, Slo.parse(args.slo)
        self._urls = tuple(f"http://{cluster.address(name, 'http')}" for name in cluster.routers)
        grpc = tuple(cluster.address(name) for name in cluster.routers)
        self._clients = Clients(args.clients, args.over, grpc, self._urls, args.think_time, args.warmup)

    async def steady(self, segment: Segment, warmup: int, rows: list[Row]) -> None:
        before = await self._ways()
        start, (samples,) = await replace(self._clients, warmup=warmup).send([segment])
        taken = {way: count for way, count in (await self._ways() - before).items() if count}
        self._note(rows, segment.row(samples, start, self._slo) | {"ways": taken})

    async def change(self, segments: Sequence[Segment], rows: list[Row]) -> None:
        """A row of each segment; then of the whole, with what each second was like."""
        seconds: list[Row] = []
        watch = asyncio.create_task(self._watch(seconds))
        try:
            start, found = await self._clients.send(segments)
        finally:
            watch.cancel()
        for segment, samples in zip(segments, found, strict=True):
            self._note(rows, segment.row(samples, start, self._slo))
        every = [sample for samples in found for sample in samples]
        end = segments[-1].begin_s + segments[-1].seconds
        due, met = by_second(every, start, self._slo)
        for second in seconds:
            second["second"] = round(second["second"] - start, 1)  # negative: of the warm-up
        timeline = [{"second": second, "due": due[second], "met": met[second]} for second in range(math.ceil(end))]
        whole = windowed(every, start, start + end, self._slo)
        whole |= {"load": "all", "rate": len(every) / end, "timeline": timeline, "watched": seconds}
        self._note(rows, whole)

    async def _ways(self) -> Counter[str]:
        """How the routers have placed requests until now, those of warm-ups included: way → number."""
        found: Counter[str] = Counter()
        for text in await self._metrics():
            for way, count in WAYS.findall(text):
                found[way] += round(float(count))
        return found

    async def _metrics(self) -> list[str]:
        return [(await self._http.get(f"{url}/metrics")).text for url in self._urls]

    async def _watch(self, seconds: list[Row]) -> None:
        """Each second: duties (of workers with a fixed role: their roles), what waits in workers and in routers."""
        while True:
            seen = await probe.workers(self._cluster.admin_address) or []
            loads = [replica for worker in seen for replica in worker.load.replicas]
            queued = sum(float(count) for text in await self._metrics() for count in QUEUED.findall(text))
            seconds.append(
                {
                    "second": time.perf_counter(),
                    "duties": dict(Counter(_duty(worker.load.duty, worker.info.role) for worker in seen)),
                    "waiting_tokens": sum(load.waiting_tokens for load in loads),
                    "sequences": sum(load.running for load in loads),
                    "queued": queued,
                }
            )
            await asyncio.sleep(POLL_S)

    def _note(self, rows: list[Row], row: Row) -> None:
        rows.append({"topology": self.topology, **row})
        print(line(rows[-1]), flush=True)


def _duty(duty: int, role: int) -> str:
    return name_of(worker_pb2.Duty, duty) if duty else name_of(worker_pb2.Role, role)


def line(row: Row) -> str:
    ttft, tpot, gap = ([1e3 * (row[name][percentile]) for percentile in ("p50", "p99")] for name in TIMES)
    return (
        f"{row['topology']:12} {row['load']:26} {row['rate']:5.2f}/s  goodput {row['goodput']:5.2f}/s"
        f"  TTFT {ttft[0]:6.0f} {ttft[1]:6.0f} ms  TPOT {tpot[0]:6.1f} {tpot[1]:6.1f} ms  gap {gap[1]:6.1f} ms"
        f"  {row.get('ways', '')}" + (f"  failed {row['errors']}" if row["errors"] else "")
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
    args = parsed()
    with tempfile.TemporaryDirectory(prefix="millrace-pd-") as folder:
        record = run(args, Path(folder))
    results = record.results
    if args.plot and args.changing:
        plots.draw_changes([row for row in results["rows"] if "timeline" in row], args.plot)
    elif args.plot and results["rows"]:
        plots.draw(plots.points({"bench": "pd", "results": results}), args.plot)
    print_record(record)
    sys.exit(int(bool(results["failed"]) or any(row["errors"] for row in results["rows"])))


def parsed(argv: Sequence[str] | None = None) -> argparse.Namespace:
    made = parser()
    args = made.parse_args(argv)
    if several := [load.name for load in args.changing if len(load.rates) > 1]:
        made.error(f"--changing: one rate for each load, not several for {several[0]}")
    if args.over == "http" and (talks := [load.name for load in (*args.loads, *args.changing) if load.turns > 1]):
        made.error(
            f"--over http: its answers have no token ids to continue with, so no load of several turns: {talks[0]}"
        )
    if args.preset:
        args.topologies = [PRESET]
    return args


def parser() -> CommandLine:
    parser = CommandLine("millrace bench pd", "Splits of the same GPUs, compared.")
    model = parser.add_mutually_exclusive_group()
    model.add_argument("--model", type=checkpoint, help="checkpoint folder (default: random weights)")
    model.add_argument("--widths", choices=list(v3.WIDTHS), default="e32", help="shapes of the random weights")
    parser.add_argument("--layers", type=int, default=61, help="layers of the random weights")
    parser.add_argument("--engine", choices=("model", "sim"), default="model", help="sim: a timing model")
    split = reader(workers, keep=True)
    parser.add_argument("--topologies", nargs="+", type=split, default=["1p+1d", "2u"], help="splits (%(default)s)")
    parser.add_argument("--preset", type=file, help="measure what the chart installs from this file")
    parser.add_argument("--gpus", type=int, default=count_gpus(), help="GPUs of a preset (%(default)s)")
    parser.add_argument("--loads", type=reader(Load.parse), nargs="+", default=[Load.parse(text) for text in LOADS])
    parser.add_argument("--seconds", type=float, default=40.0, help="seconds for which a rate is offered")
    parser.add_argument(
        "--changing", type=reader(Load.parse), nargs="+", default=[], help="loads that follow each other in one run"
    )
    parser.add_argument("--every", type=float, default=30.0, help="seconds of each load of --changing (%(default)s)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds of all loads (%(default)s)")
    parser.add_argument("--clients", type=int, default=1, help="client processes (%(default)s)")
    parser.add_argument("--over", choices=("grpc", "http"), default="grpc", help="protocol of the clients")
    parser.add_argument("--routers", type=int, default=1, help="router processes that share clients (%(default)s)")
    parser.add_argument("--warmup", type=number(int), default=8, help="uncounted requests before each load")
    parser.add_argument("--think-time", type=serving_options.TIMES, default="1", help="as for bench serving")
    parser.add_argument("--slo", type=serving_options.SLO, default=SLO, help="of goodput and of the router, seconds")
    parser.add_argument("--seed", type=number(int), default=0)
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of each system, with its start")
    parser.add_argument("--plot", type=reader(plots.check), help="write a picture (.svg or .png)")
    parser.add_argument("--worker-set", nargs="*", **SET)
    parser.add_argument("--router-set", nargs="*", **SET)
    return parser


if __name__ == "__main__":
    main()
