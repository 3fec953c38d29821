"""What the router costs: tokens and requests per second, the time that it adds, and how it scales over processes.

    millrace bench router                    in front of workers that cost nothing: the router alone
    millrace bench router --workers sim      in front of real workers with a simulated engine: the whole path, with NIXL

For each number of router processes, every one on its own port, as behind a load balancer:

1. Full load: `streams` requests at once on every router, each of `tokens` tokens; the decode worker offers one token
   per stream and step. The routers' own CPU time per token says what a core could carry, whatever else runs here.
2. Half load: half of the streams. Beside them, in processes of their own: requests one after the other, through the
   router and on the prefill worker's Link directly (the difference of their first tokens is what the router adds), and
   a stream whose tokens carry the time when the worker sent them.
3. Requests of one token, by as many clients as there are streams on half load.

Where there are more cores than routers, each router has a core that nobody else of us uses. What limits a run is named:
the routers, when each used up a core, or else the machine's cores; the CPU time of all processes is reported by role.
"""

import asyncio
import multiprocessing
import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

from millrace_load.options import CommandLine, add_options
from millrace_load.record import Record, Summary, print_record, print_row

from millrace_bench.router_load import Got, Work, direct, one_by_one, probe, start, streams, timed
from millrace_bench.router_system import Settings, System, system

WARMUP_TOKENS = 20
BUSY = 0.9  # of a core
TICK = 1 / os.sysconf("SC_CLK_TCK")  # seconds


def run(settings: Settings) -> Record:
    return Record("router", asdict(settings), asyncio.run(_measure(settings)))


async def _measure(s: Settings) -> dict[str, Any]:
    found = {}
    context = multiprocessing.get_context("spawn")
    for count in s.routers:
        async with system(s, count) as made:
            clients = count + 3
            all_started = context.Barrier(clients + 1)
            with ProcessPoolExecutor(clients, context, start, (all_started,)) as pool:
                for _ in range(clients):
                    pool.submit(int)  # starts one
                await asyncio.to_thread(all_started.wait)
                bench = _Bench(s, made, pool)
                await bench.full(WARMUP_TOKENS)
                found[str(count)] = await bench.full(s.tokens) | await bench.half() | await bench.one_token()
    return {"routers": found}


class _Bench:
    def __init__(self, s: Settings, made: System, pool: ProcessPoolExecutor) -> None:
        self._s, self._made, self._pool = s, made, pool
        self._work = [Work(s.api, address, s.prompt_tokens, s.tls) for address in made.targets(s.api)]

    async def _each(self, function: Any, *arguments: Any) -> list[Got]:
        """The function in a process for each router."""
        loop = asyncio.get_running_loop()
        calls = [loop.run_in_executor(self._pool, function, work, *arguments) for work in self._work]
        return [got for found in await asyncio.gather(*calls) for got in found]

    async def full(self, tokens: int) -> dict[str, Any]:
        before = self._made.cpu_seconds()
        got = await self._each(streams, self._s.streams, tokens)
        used = _since(before, self._made.cpu_seconds())
        seconds = max(one.last for one in got) - min(one.first for one in got)
        total, routers = len(got) * tokens, len(self._work)
        cores = {role: used[role] / seconds for role in used}
        return {
            "tokens_per_s": total / seconds,
            "tokens_per_message": total / sum(one.messages for one in got),
            "cpu_s_per_1000_tokens": used["router"] / total * 1e3,
            "tokens_per_s_per_core": total / used["router"],
            "cores": cores,
            "pinned": self._made.pinned,
            "limit": _limit(cores["router"], routers, total / seconds, len(got) / self._s.step_ms * 1e3),
        }

    async def half(self) -> dict[str, Any]:
        """The load goes on for as long as the others measure."""
        s, work, loop = self._s, self._work[0], asyncio.get_running_loop()
        load = asyncio.create_task(self._each(streams, s.streams // 2, 2 * s.tokens))
        await asyncio.sleep(0.2 * s.tokens * s.step_ms / 1e3)
        count = max(10, s.requests // 8)
        before, began = self._made.cpu_seconds(), time.perf_counter()
        latency = loop.run_in_executor(
            self._pool, timed, Work("grpc", self._made.grpc[0], s.prompt_tokens, s.tls), count
        )
        ttft = await loop.run_in_executor(self._pool, probe, work, count)
        straight = await loop.run_in_executor(self._pool, direct, self._made.prefill, work, count)
        used, seconds = _since(before, self._made.cpu_seconds()), time.perf_counter() - began
        measured_under_load = not load.done()
        latencies = (await latency).latencies if s.workers == "fake" else []
        messages = sum(got.messages for got in await load)
        through_ms, direct_ms = (Summary.of(times).milliseconds for times in (ttft, straight))
        return {
            "ttft_ms": through_ms,
            "direct_ms": direct_ms,
            "added_ttft_p50_ms": through_ms["p50"] - direct_ms["p50"],
            "added_ttft_p99_ms": through_ms["p99"] - direct_ms["p99"],
            "token_latency_ms": Summary.of(latencies).milliseconds,
            "half_tokens_per_message": s.streams // 2 * len(self._work) * 2 * s.tokens / messages,
            "half_cores": {role: used[role] / seconds for role in used},
            "under_load": measured_under_load,
        }

    async def one_token(self) -> dict[str, float]:
        clients, before, began = self._s.streams // 2, self._made.cpu_seconds(), time.perf_counter()
        got = await self._each(one_by_one, clients, 5 * self._s.requests)
        seconds = max(one.last for one in got) - min(one.start for one in got)
        assert seconds < time.perf_counter() - began
        used = _since(before, self._made.cpu_seconds())
        return {"requests_per_s": len(got) / seconds, "router_us_per_request": used["router"] / len(got) * 1e6}


def _since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """CPU seconds by role: at least a tick, since the system counts nothing shorter (a small run can use less)."""
    return {role: max(now[role] - before[role], TICK) for role in now}


def _limit(router_cores: float, routers: int, rate: float, offered: float) -> str:
    if rate > BUSY * offered:
        return "the load: it was all that was asked for"
    if router_cores > BUSY * routers:
        return "the routers: each used its core"
    return f"the machine: {os.cpu_count()} cores for routers, workers and clients"


def main() -> None:
    parser = CommandLine("millrace bench router")
    add_options(parser, Settings)
    given = vars(parser.parse_args())
    record = run(Settings(**given | {"routers": tuple(given["routers"])}))
    for count, row in record.results["routers"].items():
        print_row(f"{count} router(s)", **row)
    print_record(record)


if __name__ == "__main__":
    main()
