"""Whole servers, one after the other, before the same requests and the same faults.

millrace bench duel --server millrace-pair millrace-unified --device cuda --loads 4096/256@1,2,3 --disturbed 1024/512@4
millrace bench duel --server sglang-single --device cuda --layers 30 --faults --loads 1024/512@2     no faults
millrace bench duel --server millrace-pair --widths tiny --layers 2 --loads --disturbed 64/48@4      on a CPU

A load is INPUT/OUTPUT[xTURNS]@RATES, as of `bench pd`. A third of the requests is greedy, one seeded, one follows a
JSON schema. --loads are sent undisturbed, with --aiperf also by AIPerf. Then --disturbed is sent `--controls` times
undisturbed: the first run is the control, the others give the server's own noise, and tell whether the judge is right.
Then once for each fault of the timetable; after it, answers that differ are judged. The prompts are the same each time,
and no run finds those of another one in a cache.

--out is written again after every row, so that a run that is ended leaves what it has. Exit code 1: a server did not
start, did not end within its limit, or was wrong.
"""

import asyncio
import functools
import itertools
import shlex
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from millrace_cli.cluster import GPU_START_S, StartError, new_log_dir
from millrace_load import serving_options
from millrace_load.options import SET, CommandLine, number, output, reader
from millrace_load.record import Record, Row, busiest_gpus, print_record
from millrace_load.report import Report, Slo

from millrace_bench import v3
from millrace_bench.duel import millrace, sglang
from millrace_bench.duel.aiperf import COUNTS, AIPerf
from millrace_bench.duel.control import Control
from millrace_bench.duel.faults import STRIKE, TIMETABLE, Fault, strike, timetable
from millrace_bench.duel.load import KINDS, MODEL, Clients, write_model
from millrace_bench.duel.parts import Layout, Part, Running
from millrace_bench.pd import SLO, line
from millrace_bench.pd_load import WARMING, Load, Segment

SERVERS = {**millrace.SERVERS, **sglang.SERVERS}
RELEASE_S = 60.0  # until the KV of requests that failed is free: longer than the leases of the servers
SLACK = 64  # tokens that a text may have more than was asked for


class Duel:
    """Of one server. `note` is given a kind of row, and each row as soon as it is there."""

    def __init__(
        self, layout: Layout, folder: Path, words: Sequence[str], note: Callable[[str, Row], None], args: Namespace
    ) -> None:
        self._gpus, self._note, self._args = layout.gpus, note, args
        self._slo = Slo.parse(args.slo)
        self._aiperf = AIPerf(args.aiperf, layout.url, folder.parent / MODEL, folder, self._slo, args.patience)
        self._running = Running(layout, folder, GPU_START_S)
        self._apart = itertools.count()
        self._clients = functools.partial(Clients, layout, words, args.kinds, args.patience)

    async def run(self) -> None:
        begin = time.perf_counter()
        async with asyncio.timeout(self._args.limit), self._running.running():
            commands = {part.name: shlex.join(part.command) for part in self._running.parts}
            self._note("servers", {"start_s": time.perf_counter() - begin, "commands": commands})
            for load in self._args.loads:
                await self._undisturbed(load)
            if self._args.disturbed is not None:
                await self._disturbed(self._args.disturbed)

    async def _undisturbed(self, load: Load) -> None:
        # The batches of the highest rate compile kernels before any row counts.
        await self._new().load(Segment(load, max(load.rates), self._args.seconds / 2, seed=len(load.rates)))
        for seed, rate in enumerate(load.rates):
            segment = Segment(load, rate, self._args.seconds, seed)
            with busiest_gpus() as gpus:
                start = await (clients := self._new()).load(segment)
            samples = list(clients.seen.values())
            row = segment.row(samples, start, self._slo)
            row |= {"watts": [gpu["power_w"] for gpu in gpus], "mhz": [gpu["sm_mhz"] for gpu in gpus]}
            row["tokens_per_s_and_gpu"] = row["output_token_throughput"] / self._gpus if self._gpus else None
            self._note("rows", row)
            if self._args.aiperf:
                whole = Report.of(samples, self._slo).as_dict()  # also what was due after the time of the load
                ours = {"requests": len(samples), **{name: whole[name] for name in COUNTS}}
                found = await self._aiperf.measure(segment, self._new())
                self._note("aiperf", {"load": load.name, "rate": rate, **found, "ours": ours})

    async def _disturbed(self, load: Load) -> None:
        segment = Segment(load, load.rates[0], self._args.seconds, seed=0)
        await self._new().burst(load, WARMING, WARMING)
        first, *others = [await self._sent(segment) for _ in range(self._args.controls)]
        control = Control(first, self._args.kinds, self._new)
        for row in await control.measure(others):
            self._note("noise", {"load": load.name, **row})
        faults = [fault for fault in TIMETABLE if fault.name in self._args.faults]
        for fault, victim in timetable(self._running.parts, faults):
            async with asyncio.TaskGroup() as group:
                struck = group.create_task(self._strike(fault, victim, segment))
                run = await self._sent(segment)
            at, whole_s = struck.result()
            row = {"fault": fault.name, "victim": victim.name if victim else "", "rate": segment.rate}
            row |= {"whole_s": whole_s, "lost": None if whole_s is None else await self._running.held(RELEASE_S)}
            self._note("faults", row | await control.conclude(at, run, whole=whole_s is not None))
            if whole_s is None:
                await self._running.begin()

    def _new(self, *, judged: bool = False) -> Clients:
        return self._clients(next(self._apart), judged=judged)

    async def _sent(self, segment: Segment) -> Clients:
        clients = self._new(judged=True)
        await clients.load(segment)
        return clients

    async def _strike(self, fault: Fault, victim: Part | None, segment: Segment) -> tuple[float, float | None]:
        """When it struck, by time.perf_counter(), and after how many seconds every part served again; None: never."""
        await asyncio.sleep(STRIKE * segment.seconds)
        at = time.perf_counter()
        if victim is None:
            await self._new().burst(segment.load, fault.clients, fault.clients, fault.seconds)
        else:
            await strike(fault, victim, self._running)
        whole = await self._running.whole(restart=True)
        return at, time.perf_counter() - at if whole else None


def run(args: Namespace, folder: Path) -> Record:
    """All servers, one after the other. The record is in --out after each row; `folder` gets the model and logs."""
    results: dict[str, list[Row]] = {"servers": [], "rows": [], "aiperf": [], "noise": [], "faults": [], "failed": []}
    record = Record("duel", vars(args), results)
    args.out.parent.mkdir(parents=True, exist_ok=True)

    def note(server: str, kind: str, row: Row) -> None:
        results[kind].append({"server": server, **row})
        args.out.write_text(record.to_json() + "\n")
        print(line({"topology": server, **row}) if kind == "rows" else results[kind][-1], flush=True)

    words = write_model(folder / MODEL, args.widths, args.layers)
    loads = [*args.loads, *([args.disturbed] if args.disturbed else [])]
    longest = max(load.longest + load.turns * load.output_len for load in loads) + SLACK
    for name in args.server:
        layout = SERVERS[name](args, folder / MODEL, longest)
        try:
            asyncio.run(Duel(layout, folder / name, words, functools.partial(note, name), args).run())
        except (TimeoutError, StartError) as error:
            note(name, "failed", {"why": str(error) or f"not done after {args.limit:.0f} s"})
    return record


def parsed(argv: Sequence[str] | None = None) -> Namespace:
    args = (made := parser()).parse_args(argv)
    if args.aiperf and shutil.which(args.aiperf) is None:
        made.error(f"--aiperf: no program {args.aiperf} (`make peers` makes build/peers/aiperf/bin/aiperf)")
    if args.disturbed and (args.disturbed.turns > 1 or len(args.disturbed.rates) > 1):
        made.error("--disturbed: one rate and one turn: a turn depends on the answer before it")
    if not (args.loads or args.disturbed):
        made.error("--loads: none, and no --disturbed: nothing to send")
    return args


def parser() -> CommandLine:
    parser = CommandLine("millrace bench duel", __doc__)
    parser.add_argument("--server", nargs="+", choices=list(SERVERS), required=True, metavar="NAME", help="%(choices)s")
    parser.add_argument("--widths", choices=list(v3.WIDTHS), default="e32", help="of the model; weights are random")
    parser.add_argument("--layers", type=int, default=61)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--engine", choices=("model", "sim"), default="model", help="of Millrace; sim: a timing model")
    parser.add_argument("--loads", type=reader(Load.parse), nargs="*", default=[], help="undisturbed")
    parser.add_argument("--disturbed", type=reader(Load.parse), help="load before the faults, at one rate")
    names = [fault.name for fault in TIMETABLE]
    parser.add_argument("--faults", nargs="*", choices=names, default=names, metavar="NAME", help="%(choices)s")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS), help="of requests, in turns")
    parser.add_argument("--seconds", type=float, default=20.0, help="for which a rate is offered")
    parser.add_argument("--controls", type=number(int, 2), default=2, help="undisturbed runs before faults (2)")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds after which a request hangs")
    parser.add_argument("--slo", type=serving_options.SLO, default=SLO, help="of goodput, seconds")
    parser.add_argument("--aiperf", type=Path, metavar="PATH", help="AIPerf's program: a second client of --loads")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of each server, its start included")
    parser.add_argument("--out", type=output, default=Path("build/duel.json"), help="(%(default)s)")
    parser.add_argument("--worker-set", nargs="*", **SET, help="of Millrace's workers")
    parser.add_argument(
        "--peer", type=shlex.split, default=[], metavar="ARGUMENTS", help="of a peer's servers, in quotes"
    )
    return parser


def main() -> None:
    record = run(parsed(), new_log_dir())
    print_record(record)
    broken = any(row["wrong"] or row["hung"] for row in record.results["faults"])
    sys.exit(int(broken or bool(record.results["failed"])))


if __name__ == "__main__":
    main()
