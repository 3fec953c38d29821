"""What TLS costs a router: `bench router` without and with it, in turns, each time with new processes.

    python -m millrace_bench.router_tls --tls FOLDER                  workers that cost nothing: the router alone
    python -m millrace_bench.router_tls --tls FOLDER --workers sim    prefill and decode with NIXL between them

With TLS all connections have it: clients show no certificate, routers and workers do.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from millrace_load.record import Record, print_record

from millrace_bench.router import run
from millrace_bench.router_system import Settings

SHOWN = ("router_us_per_token", "router_us_per_request", "ttft_ms", "added_ttft_p50_ms")


def measure(settings: Settings, turns: int) -> list[dict[str, Any]]:
    return [
        row(run(replace(settings, tls=tls)).results["routers"]["1"], tls is not None)
        for _ in range(turns)
        for tls in (None, settings.tls)
    ]


def row(found: dict[str, Any], tls: bool) -> dict[str, Any]:
    """Of one run: CPU times of the router, and first tokens at half load (p50)."""
    return {
        "tls": tls,
        "router_us_per_token": found["cpu_s_per_1000_tokens"] * 1e3,
        "router_us_per_request": found["router_us_per_request"],
        "tokens_per_s_per_core": found["tokens_per_s_per_core"],
        "tokens_per_message": found["tokens_per_message"],
        "ttft_ms": found["ttft_ms"]["p50"],
        "direct_ms": found["direct_ms"]["p50"],
        "added_ttft_p50_ms": found["added_ttft_p50_ms"],
        "cores": found["cores"],
    }


def medians(rows: Sequence[dict[str, Any]], tls: bool) -> dict[str, float]:
    return {name: statistics.median(one[name] for one in rows if one["tls"] is tls) for name in SHOWN}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m millrace_bench.router_tls", description=__doc__)
    parser.add_argument("--tls", type=Path, required=True, help="folder with tls.crt, tls.key and ca.crt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--workers", choices=("fake", "sim"), default="fake")
    parser.add_argument("--api", choices=("grpc", "http"), default="grpc")
    parser.add_argument("--streams", type=int, default=Settings().streams)
    parser.add_argument("--tokens", type=int, default=Settings().tokens)
    given = vars(parser.parse_args())
    turns = given.pop("turns")
    settings = Settings(routers=(1,), **given)
    rows = measure(settings, turns)
    for tls in (False, True):
        print("TLS" if tls else "plain", *(f"{name} {value:.3f}" for name, value in medians(rows, tls).items()))
    print_record(Record("router_tls", asdict(settings) | {"turns": turns}, {"rows": rows}))


if __name__ == "__main__":
    main()
