"""The command `make chaos`.

    make chaos ARGS="--minutes 3 --out chaos.json"          faults, one after the other (chaos.py)
    make chaos ARGS="--duties"                              the same with flexible workers whose duties change
    make chaos ARGS="--minutes 30 --calm --burners 8"       no fault at all, on a machine without time for it
    make chaos ARGS="--minutes 10 --calm --throttled all"   no fault at all, and every process gets a fifth of the time
    make chaos ARGS="--overload"                            too many requests, and kills (overload_chaos.py)
    make chaos ARGS="--hostile"                             honest tenants beside a hostile one (beside_hostile.py)

It prints a table and ends with 1 when something is not as it must be.
"""

import argparse
import asyncio
import logging
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path

from millrace_load.record import Record, print_record

from millrace_testing.beside_hostile import beside_hostile
from millrace_testing.chaos import THROTTLED, burning, calm, chaos, faults_of, shuffled
from millrace_testing.namespaces import available
from millrace_testing.overload_chaos import overload

log = logging.getLogger(__name__)

MINUTES = {"chaos": 3.0, "duties": 3.0, "calm": 3.0, "overload": 10.0, "hostile": 10.0}


def main() -> None:
    parser = argparse.ArgumentParser(prog="make chaos", formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help=f"how long; the defaults are {MINUTES}")
    parser.add_argument("--clients", type=int, default=12, help="requests at the same time, 12 by default")
    parser.add_argument("--only", default="", help="faults whose names it is found in, a regular expression")
    for name, what in (
        ("duties", "faults, with flexible workers whose duties change every 5 seconds"),
        ("calm", "no faults: nobody may be taken for hung"),
        ("overload", "1.5 and 2 times as many requests as can be served, while workers are killed"),
        ("hostile", "turns without and with a hostile tenant: the others notice nothing"),
    ):
        parser.add_argument(f"--{name}", dest="run", action="store_const", const=name, default="chaos", help=what)
    parser.add_argument("--throttled", choices=THROTTLED, default="", help="with --calm: who gets a fifth of the time")
    parser.add_argument("--burners", type=int, default=0, help="processes that keep the cores busy meanwhile")
    parser.add_argument("--seed", type=int, default=0, help="seed of the faults and of the load")
    parser.add_argument("--out", type=Path, help="file for the record, as JSON")
    settings = parser.parse_args()
    flexible = settings.run == "duties"
    if not (known := faults_of(flexible, settings.only)):
        parser.error(f"--only: {settings.only!r} is found in no fault's name")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder = Path(tempfile.mkdtemp(prefix="millrace-chaos-"))
    minutes, clients, seed = settings.minutes or MINUTES[settings.run], settings.clients, settings.seed
    # not on uvloop, which forks: between threads of gRPC a child of it may crash before it has become a worker
    before, load_before = time.monotonic(), os.getloadavg()[0]
    with burning(settings.burners):
        if settings.run == "calm":
            report = asyncio.run(calm(folder, minutes, clients, seed, settings.throttled))
        elif settings.run == "overload":
            report = asyncio.run(overload(folder, minutes, seed))
        elif settings.run == "hostile":
            report = asyncio.run(beside_hostile(folder, minutes, clients, seed))
        else:
            spaces = available()
            log.info(
                "workers are cut off by %s", "network namespaces" if spaces else "proxies that let nothing through"
            )
            faults = shuffled(known, minutes, seed)
            report = asyncio.run(chaos(folder, faults, clients, seed, namespaces=spaces, flexible=flexible))
    load = {"at_start": load_before, "at_end": os.getloadavg()[0]}  # processes that run or want to
    results = {"duration_s": time.monotonic() - before, "load": load, **report.results()}
    print(report.table())  # noqa: T201
    for key, value in results.items():
        if key not in ("faults", "rows", "outcomes"):
            print(f"{key}: {value}")  # noqa: T201
    config = {key: value for key, value in vars(settings).items() if key != "out"} | {"minutes": minutes}
    name = {"chaos": "chaos", "calm": "chaos"}.get(settings.run, f"chaos-{settings.run}")
    record = Record(name, config, results, command=f'make chaos ARGS="{shlex.join(sys.argv[1:])}"')
    if settings.out:
        settings.out.write_text(record.to_json() + "\n")
    print_record(record)
    if broken := report.broken():
        listed = "\n".join(broken[:10])
        raise SystemExit(f"{len(broken)} violations, the first ones:\n{listed}\nlogs: {folder}")


if __name__ == "__main__":
    main()
