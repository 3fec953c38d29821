"""Our router beside `smg`, a gateway in Rust, in the same run.

    python -m millrace_bench.peers.router --rounds 3

Both get streams of one token per step from workers that cost nothing, and the same clients. smg passes the bytes of
one HTTP worker through; our router tokenizes, merges the outputs of a prefill and a decode worker, detokenizes and
writes the answer, over HTTP and over gRPC. A server that does nothing but send over gRPC shows the library's part. They
take turns, `rounds` times, at a quarter, half and all of `streams`:

1. CPU time of the router's processes, by the tokens that the clients got meanwhile.
2. The time of each token of one more stream from its worker to its client.
3. The first tokens of requests one after the other: through the router, and at the worker itself. The difference of
   the medians is what the router adds.

Then memory with `memory_streams` streams at once, which get a token per second. Where there are two cores or more, the
routers have one for themselves. requirements/peers.txt has the command that installs smg.
"""

import asyncio
import functools
import multiprocessing
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from millrace_load.options import CommandLine, add_options
from millrace_load.record import ROOT, Record, Summary, print_record, print_row

from millrace_bench.peers.clients import Load, first_tokens, latencies
from millrace_bench.peers.sides import Side, sides

SMG = ROOT / "build" / "peers" / "smg" / "bin" / "smg"
SETTLE_S, MEMORY_STEP_MS = 1.0, 1000.0
MILLISECONDS = 1e3


@dataclass(frozen=True, slots=True)
class Settings:
    smg: Annotated[Path, "smg's executable"] = SMG
    streams: Annotated[int, "streams at full load"] = 256
    step_ms: Annotated[float, "step time of the workers: one token per stream"] = 10.0
    seconds: Annotated[float, "seconds of each measurement"] = 5.0
    requests: Annotated[int, "requests whose first tokens are measured"] = 30
    rounds: Annotated[int, "rounds; the routers alternate"] = 3
    memory_streams: Annotated[int, "streams while memory is read"] = 2_000


def run(s: Settings) -> Record:
    """SystemExit when smg is not installed."""
    if not s.smg.exists():
        raise SystemExit(f"there is no {s.smg}: requirements/peers.txt has the command that installs smg")
    return Record("peers.router", asdict(s), asyncio.run(_measure(s)))


async def _measure(s: Settings) -> dict[str, Any]:
    loads = {"quarter": s.streams // 4, "half": s.streams // 2, "full": s.streams}
    rounds: dict[str, dict[str, list[dict[str, Any]]]] = {}
    context = multiprocessing.get_context("spawn")
    async with sides(s.smg, s.step_ms) as running:
        with ProcessPoolExecutor(1, context) as pool:
            for _ in range(s.rounds):
                for name, streams in loads.items():
                    for side_name, side in running.items():
                        row = await _level(s, side, streams, pool)
                        rounds.setdefault(side_name, {}).setdefault(name, []).append(row)
    async with sides(s.smg, MEMORY_STEP_MS) as running:
        memory = {name: await _memory(side, s.memory_streams) for name, side in running.items()}
    return {name: {"loads": rounds[name], "memory": memory[name]} for name in rounds}


async def _level(s: Settings, side: Side, streams: int, pool: ProcessPoolExecutor) -> dict[str, Any]:
    measured = functools.partial(asyncio.get_running_loop().run_in_executor, pool)
    async with Load(side.target, streams) as load:
        await asyncio.sleep(SETTLE_S)
        cpu_s, (tokens, counted), began = side.cpu_s(), load.tokens(), time.perf_counter()
        await asyncio.sleep(s.seconds)
        cores = (side.cpu_s() - cpu_s) / (time.perf_counter() - began)
        more, later = load.tokens()
        rate = (more - tokens) / (later - counted)
        token_s = await measured(latencies, side.target, s.seconds)
        through = await measured(first_tokens, side.target, s.requests)
        straight = await measured(side.direct, s.requests)
    return {
        "tokens_per_s": rate,
        "cores": cores,
        "us_per_token": cores / rate * 1e6,
        "token_ms": Summary.of(token_s).milliseconds,
        "ttft_ms": Summary.of(through).milliseconds,
        "direct_ms": Summary.of(straight).milliseconds,
        "added_ttft_p50_ms": (statistics.median(through) - statistics.median(straight)) * MILLISECONDS,
        "load_average": os.getloadavg()[0],
    }


async def _memory(side: Side, streams: int) -> dict[str, float]:
    idle = side.rss_mb()
    async with Load(side.target, streams):
        await asyncio.sleep(5 * SETTLE_S)
        full = side.rss_mb()
    return {"idle_mb": idle, "mb": full, "kb_per_stream": (full - idle) / streams * 1e3}


def main() -> None:
    parser = CommandLine("python -m millrace_bench.peers.router")
    add_options(parser, Settings)
    record = run(Settings(**vars(parser.parse_args())))
    for name, found in record.results.items():
        for load, rows in found["loads"].items():
            for row in rows:
                print_row(name, load, **row)
        print_row(name, **found["memory"])
    print_record(record)


if __name__ == "__main__":
    main()
