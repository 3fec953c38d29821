"""What the router costs: streamed tokens per second through one router process, and the time that it adds to the first
token.

    millrace bench router                    in front of workers that cost nothing: the router alone
    millrace bench router --workers sim      in front of real workers with a simulated engine: the whole path, with NIXL

1. Start one prefill and one decode worker (fake_worker.py, or millrace_serve with engine=sim) and a router.
2. Throughput: `streams` requests at once, each of `tokens` tokens; the decode worker offers one token per stream and
   step. The router's own CPU time per token says what one core could carry, whatever else runs on the machine.
3. First token: `concurrency` clients, each reading one reply after the other through the router; then as often on
   the prefill worker's Link directly. The difference is what the router adds.
4. Requests of one token, as many as the machine can do: the router's own CPU time for each.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import grpc
import httpx
from millrace.v1 import (
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from millrace_cli.cluster import TINY, server_command
from millrace_rpc.client import channel

from millrace_bench.common import Record, Summary, print_record

TARGET_TOKENS_PER_S, TARGET_ADDED_MS = 15_000, 2.0
PAGE_SIZE = 64
CONNECTIONS = 4  # HTTP/2 allows about 100 streams on one
WARMUP_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Settings:
    model: Path = TINY
    workers: Literal["fake", "sim"] = "fake"
    streams: int = 256
    tokens: int = 300
    step_ms: float = 10.0
    concurrency: int = 16
    requests: int = 20
    reply_tokens: int = 32
    prompt_tokens: int = 512


@dataclass(frozen=True, slots=True)
class Throughput:
    """`seconds` from the first token of any stream to the last of all."""

    tokens: int
    messages: int
    seconds: float
    router_cpu_s: float

    def as_dict(self) -> dict[str, float]:
        return {
            "tokens_per_s": self.tokens / self.seconds,
            "tokens_per_message": self.tokens / self.messages,
            "router_us_per_token": self.router_cpu_s / self.tokens * 1e6,
            "router_cores": self.router_cpu_s / self.seconds,
            "tokens_per_s_per_core": self.tokens / self.router_cpu_s,
        }


def run(settings: Settings) -> Record:
    return Record("router", asdict(settings), asyncio.run(_measure(settings)))


async def _measure(s: Settings) -> dict[str, object]:
    prompt, length = [10 + i % 200 for i in range(s.prompt_tokens)], _lengths(s.reply_tokens)
    async with _system(s) as system:
        await _streams(system, s.streams, WARMUP_TOKENS, prompt)
        throughput = await _streams(system, s.streams, s.tokens, prompt)
        await _closed_loop(s.concurrency, 2, lambda: _reply(system, prompt, next(length)))
        routed = await _closed_loop(s.concurrency, s.requests, lambda: _reply(system, prompt, next(length)))
        async with _direct(system.prefill, prompt) as first_token:
            direct = await _closed_loop(s.concurrency, s.requests, lambda: first_token(next(length) * s.step_ms / 1000))
        before, start = _cpu_seconds(system.router_pid), time.perf_counter()
        one_token = await _closed_loop(s.concurrency, 10 * s.requests, lambda: _reply(system, prompt, 1))
        seconds, cpu = time.perf_counter() - start, _cpu_seconds(system.router_pid) - before
    return throughput.as_dict() | {
        "ttft_ms": _milliseconds(routed),
        "direct_ms": _milliseconds(direct),
        "added_ttft_p50_ms": (Summary.of(routed).p50 - Summary.of(direct).p50) * 1e3,
        "one_token_requests_per_s": len(one_token) / seconds,
        "router_us_per_request": cpu / len(one_token) * 1e6,
    }


# ------------------------------------------------------------------------------------- the processes


@dataclass(slots=True)
class System:
    router_pid: int
    prefill: str  # address
    stubs: list[inference_pb2_grpc.InferenceStub]
    turn: int = 0

    def stub(self) -> inference_pb2_grpc.InferenceStub:
        self.turn += 1
        return self.stubs[self.turn % len(self.stubs)]


def _worker(role: str, s: Settings) -> list[str]:
    """The command of a worker that holds all streams at once."""
    if s.workers == "fake":
        return [sys.executable, "-m", "millrace_bench.fake_worker", role, "--step-ms", str(s.step_ms)]
    sequences, length = max(s.streams, s.concurrency), s.prompt_tokens + max(s.tokens, 2 * s.reply_tokens)
    values = {
        "engine": "sim",
        "log_level": "WARNING",
        "sim.step_s": s.step_ms / 1000 if role == "decode" else 0.0,
        "limits.max_model_len": length,
        "limits.max_running": sequences,
        "limits.num_pages": sequences * (length // PAGE_SIZE + 2),
    }
    return server_command(role) + [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


@contextlib.asynccontextmanager
async def _system(s: Settings) -> AsyncIterator[System]:
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-bench-")))
        addresses = {}
        for role in ("prefill", "decode"):
            _, ports = await _start(stack, _worker(role, s), folder / f"{role}.json")
            addresses[role] = f"127.0.0.1:{ports['grpc']}"
        router = [*server_command("router"), "--set", f"model={s.model}"]
        router += ["--set", f"workers={json.dumps(list(addresses.values()))}", "--set", "log_level=WARNING"]
        _, ports = await _start(stack, router, folder / "router.json")
        await _ready(f"http://127.0.0.1:{ports['http']}/ready")
        channels = [await stack.enter_async_context(channel(f"127.0.0.1:{ports['grpc']}")) for _ in range(CONNECTIONS)]
        stubs = [inference_pb2_grpc.InferenceStub(ch) for ch in channels]
        yield System(ports["pid"], addresses["prefill"], stubs)


async def _start(
    stack: contextlib.AsyncExitStack, command: list[str], announce: Path
) -> tuple[asyncio.subprocess.Process, dict[str, int]]:
    process = await asyncio.create_subprocess_exec(*command, "--announce", str(announce))
    stack.push_async_callback(_stop, process)
    async with asyncio.timeout(60):
        while not os.path.exists(announce):  # noqa: ASYNC240
            if process.returncode is not None:
                raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
            await asyncio.sleep(0.05)
    return process, json.loads(announce.read_text())  # noqa: ASYNC240


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), 10)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _ready(url: str) -> None:
    async with asyncio.timeout(60), httpx.AsyncClient() as client:
        while (await client.get(url)).status_code != 200:
            await asyncio.sleep(0.05)


def _cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------- the load


async def _streams(system: System, count: int, tokens: int, prompt: list[int]) -> Throughput:
    before = _cpu_seconds(system.router_pid)
    results = await asyncio.gather(*(_stream(system.stub(), tokens, prompt) for _ in range(count)))
    cpu = _cpu_seconds(system.router_pid) - before
    begin, end = min(result[0] for result in results), max(result[1] for result in results)
    return Throughput(sum(r[2] for r in results), sum(r[3] for r in results), end - begin, cpu)


async def _stream(
    stub: inference_pb2_grpc.InferenceStub, tokens: int, prompt: list[int]
) -> tuple[float, float, int, int]:
    """Time of the first and the last message, tokens, messages."""
    first, got, messages = 0.0, 0, 0
    async for response in stub.Generate(_request(prompt, tokens)):
        first = first or time.perf_counter()
        got += len(response.token_ids)
        messages += 1
    if got != tokens:
        raise SystemExit(f"a stream ended after {got} of {tokens} tokens")
    return first, time.perf_counter(), got, messages


async def _closed_loop(clients: int, requests: int, call: Callable[[], Awaitable[float]]) -> list[float]:
    """The seconds that every call reports."""

    async def client() -> list[float]:
        return [await call() for _ in range(requests)]

    return [seconds for found in await asyncio.gather(*(client() for _ in range(clients))) for seconds in found]


async def _reply(system: System, prompt: list[int], tokens: int) -> float:
    """Read a whole reply; seconds to its first token."""
    start = time.perf_counter()
    first, *_ = await _stream(system.stub(), tokens, prompt)
    return first - start


def _lengths(mean: int) -> Iterator[int]:
    """Replies of different lengths: clients that read equal ones would all send their next request at once."""
    choices = random.Random(0)
    while True:
        yield max(1, round(mean * choices.uniform(0.5, 1.5)))


def _milliseconds(seconds: list[float]) -> dict[str, float]:
    return {name: value * 1e3 for name, value in asdict(Summary.of(seconds)).items()}


def _request(prompt: list[int], tokens: int) -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
    return inference_pb2.GenerateRequest(prompt={"token_ids": {"ids": prompt}}, sampling=sampling)


@contextlib.asynccontextmanager
async def _direct(address: str, prompt: list[int]) -> AsyncIterator[Callable[[float], Awaitable[float]]]:
    """Calls that send a prompt on a Link of our own, wait for its token, and then for as long as a reply takes."""
    async with channel(address) as ch:
        info = await worker_pb2_grpc.WorkerServiceStub(ch).GetInfo(worker_pb2.GetInfoRequest())
        link = prefill_pb2_grpc.PrefillServiceStub(ch).Link()
        hello = worker_pb2.LinkHello(router_id="bench", epoch=info.epoch)
        await link.write(prefill_pb2.PrefillLinkRequest(hello=hello))
        await link.read()
        waiting: dict[int, asyncio.Future[None]] = {}
        writing = asyncio.Lock()

        async def read() -> None:
            while (response := await link.read()) is not grpc.aio.EOF:
                for out in response.outputs.outputs:
                    waiting.pop(out.id.room).set_result(None)

        async def call(pause_s: float) -> float:
            start = time.perf_counter()
            room = secrets.randbits(63)
            request = worker_pb2.EngineRequest(
                id={"room": room}, token_ids=prompt, sampling={"max_tokens": 1, "seed": 0}
            )
            waiting[room] = asyncio.get_running_loop().create_future()
            done = waiting[room]
            async with writing:  # a stream takes one write at a time
                await link.write(prefill_pb2.PrefillLinkRequest(submit={"request": request}))
            await done
            seconds = time.perf_counter() - start
            await asyncio.sleep(pause_s)
            return seconds

        reader = asyncio.create_task(read())
        try:
            yield call
        finally:
            reader.cancel()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="millrace bench router", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder with the tokenizer's files")
    parser.add_argument("--workers", choices=("fake", "sim"), help="what stands behind the router")
    parser.add_argument("--streams", type=int, help="of the throughput measurement, at once")
    parser.add_argument("--tokens", type=int, help="per stream")
    parser.add_argument("--step-ms", type=float, help="of the decode worker: one token per stream")
    parser.add_argument("--concurrency", type=int, help="of the first-token measurement")
    parser.add_argument("--requests", type=int, help="per client of it")
    parser.add_argument("--reply-tokens", type=int, help="of each of its requests")
    parser.add_argument("--prompt-tokens", type=int, help="of every request")
    parser.set_defaults(**asdict(Settings()))
    record = run(Settings(**vars(parser.parse_args())))
    found = record.results
    print(
        f"{found['tokens_per_s']:,.0f} tokens/s (target {TARGET_TOKENS_PER_S:,}) in messages of "
        f"{found['tokens_per_message']:.2f}; the router took {found['router_cores']:.2f} cores, "
        f"{found['router_us_per_token']:.1f} us/token\n"
        f"first token p50 {found['ttft_ms']['p50']:.2f} ms, direct {found['direct_ms']['p50']:.2f} ms: "
        f"added {found['added_ttft_p50_ms']:.2f} ms (target {TARGET_ADDED_MS})\n"
        f"one-token requests: {found['one_token_requests_per_s']:,.0f}/s, the router took "
        f"{found['router_us_per_request']:.0f} us each"
    )
    print_record(record)


if __name__ == "__main__":
    main()
