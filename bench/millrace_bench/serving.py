"""Loads a running Millrace, or one of its own, like many clients.

    millrace bench serving --self-serve --num-requests 200 --concurrency 16          closed loop
    millrace bench serving --address 127.0.0.1:50051 --request-rate 20               open loop, Poisson arrivals

1. Draw all requests from the seed. 2. Send the warm-up requests; they are not counted. 3. Send the others: in the
closed loop each of `concurrency` clients sends its next request when the last one ended; in the open loop requests
are sent when they are due, whether or not earlier ones have ended. 4. Print the tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin, get_type_hints

import grpc
import httpx
from millrace_cli.cluster import TINY, ClusterSpec, LocalCluster, StartError
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from millrace_bench.clients import Client, GrpcClient, HttpClient, Options, Sample, Target
from millrace_bench.common import Record, print_record
from millrace_bench.report import Report, Slo, latency_table, throughput_table
from millrace_bench.workload import Job, Lengths, SharedPrefix, Workload, poisson_arrivals

ADDRESSES = {"grpc": "127.0.0.1:50051", "http": "http://127.0.0.1:8000"}


@dataclass(frozen=True, slots=True)
class Settings:
    """Everything that a run depends on; each field is a command-line option."""

    api: Annotated[Literal["grpc", "http"], "which of the router's two interfaces"] = "grpc"
    address: Annotated[str, "host:port for grpc, URL for http; empty: where serve-local listens"] = ""
    self_serve: Annotated[bool, "start a system for this run"] = False
    prefill: Annotated[int, "with --self-serve: prefill workers"] = 1
    decode: Annotated[int, "with --self-serve: decode workers"] = 1
    unified: Annotated[bool, "with --self-serve: one unified worker instead"] = False
    engine: Annotated[Literal["model", "sim"], "with --self-serve: what the workers run"] = "model"
    model: Annotated[Path, "with --self-serve: checkpoint folder"] = TINY
    num_requests: Annotated[int, "counted requests"] = 100
    warmup: Annotated[int, "requests before them that are not counted"] = 8
    request_rate: Annotated[float, "open loop: mean requests per second; 0: closed loop"] = 0.0
    concurrency: Annotated[int, "closed loop: clients"] = 16
    input_len: Annotated[str, "prompt tokens: N, LOW:HIGH (uniform) or lognormal:MEDIAN:SIGMA"] = "128"
    output_len: Annotated[str, "output tokens, as --input-len"] = "32"
    shared_prefix: Annotated[str, "FRACTION:LENGTH: that many prompts begin with the same tokens"] = "0:0"
    text: Annotated[bool, "send text instead of token ids (http: always)"] = False
    temperature: Annotated[float, "of the sampling"] = 0.0
    ignore_eos: Annotated[bool, "always generate the whole output length"] = False
    seed: Annotated[int, "of prompts, lengths and arrivals"] = 0
    slo: Annotated[str, "for goodput, in seconds, for example ttft=0.5,tpot=0.05"] = ""

    def __post_init__(self) -> None:
        """ValueError for what cannot be run."""
        for name, least in (("num_requests", 1), ("concurrency", 1), ("warmup", 0), ("request_rate", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, not {getattr(self, name)}")
        for parse, text in (
            (Lengths.parse, self.input_len),
            (Lengths.parse, self.output_len),
            (SharedPrefix.parse, self.shared_prefix),
            (Slo.parse, self.slo),
        ):
            parse(text)


def run(settings: Settings, console: Console | None = None) -> Record:
    """Load the target and print the tables; the record is what the JSON line holds."""
    console = console or Console(stderr=True, highlight=False)
    target, samples = asyncio.run(collect(settings, console))
    slo = Slo.parse(settings.slo)
    report = Report.of(samples, slo)
    console.print(latency_table(report), throughput_table(report, slo))
    return Record("serving", asdict(settings) | {"target": asdict(target)}, report.as_dict())


async def collect(settings: Settings, console: Console) -> tuple[Target, list[Sample]]:
    """What was loaded, and what each counted request did."""
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(_address(settings, console))
        options = Options(settings.temperature, settings.ignore_eos)
        client = HttpClient(address, options) if settings.api == "http" else GrpcClient(address, options)
        stack.push_async_callback(client.close)
        target = await client.target()
        with _progress(console) as begin:
            warmup = _jobs(settings, target, settings.warmup, stream=1)
            await _closed_loop(client, warmup, settings.concurrency, begin("warm-up", len(warmup)))
            jobs = _jobs(settings, target, settings.num_requests, stream=0)
            count = begin("requests", len(jobs))
            if settings.request_rate > 0:
                samples = await _open_loop(client, jobs, settings.request_rate, settings.seed, count)
            else:
                samples = await _closed_loop(client, jobs, settings.concurrency, count)
        return target, samples


@contextlib.asynccontextmanager
async def _address(settings: Settings, console: Console) -> AsyncIterator[str]:
    """Where to send requests; with `self_serve`, for as long as the system runs."""
    if not settings.self_serve:
        yield settings.address or ADDRESSES[settings.api]
        return
    spec = ClusterSpec(
        prefill=0 if settings.unified else settings.prefill,
        decode=0 if settings.unified else settings.decode,
        unified=int(settings.unified),
        engine=settings.engine,
        model=settings.model,
        log_dir=Path(tempfile.mkdtemp(prefix="millrace-bench-")),
    )
    cluster = LocalCluster(spec)
    console.print(f"starting a system; logs in {cluster.log_dir}", style="dim")
    async with cluster:
        yield cluster.http_url if settings.api == "http" else cluster.grpc_address


def _jobs(settings: Settings, target: Target, count: int, stream: int) -> list[Job]:
    """Streams have different prompts, so that the warm-up does not fill the prefix cache for the rest."""
    workload = Workload(
        input_len=Lengths.parse(settings.input_len),
        output_len=Lengths.parse(settings.output_len),
        prefix=SharedPrefix.parse(settings.shared_prefix),
        vocab_size=0 if settings.text else target.vocab_size,
        max_context=target.max_context,
        seed=2 * settings.seed + stream,
    )
    return workload.jobs(count)


async def _closed_loop(client: Client, jobs: list[Job], concurrency: int, done: Callable[[], None]) -> list[Sample]:
    waiting, samples = iter(jobs), []

    async def one_client() -> None:
        for job in waiting:
            samples.append(Sample(due=time.perf_counter()))
            await client.send(job, samples[-1])
            done()

    await asyncio.gather(*(one_client() for _ in range(concurrency)))
    return samples


async def _open_loop(client: Client, jobs: list[Job], rate: float, seed: int, done: Callable[[], None]) -> list[Sample]:
    start, samples = time.perf_counter(), []

    async def one_request(job: Job, sample: Sample) -> None:
        await client.send(job, sample)
        done()

    async with asyncio.TaskGroup() as group:
        for job, arrival in zip(jobs, poisson_arrivals(rate, seed), strict=False):
            await asyncio.sleep(start + arrival - time.perf_counter())
            samples.append(Sample(due=start + arrival))
            group.create_task(one_request(job, samples[-1]))
    return samples


@contextlib.contextmanager
def _progress(console: Console) -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Yields a function that begins a bar of a name and length, and returns what moves it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def begin(name: str, total: int) -> Callable[[], None]:
            task = progress.add_task(name, total=total)
            return lambda: progress.advance(task)

        yield begin


def parse(argv: Sequence[str] | None = None) -> Settings:
    form = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(prog="millrace bench serving", formatter_class=form)
    hints = get_type_hints(Settings, include_extras=True)
    for item in fields(Settings):
        kind, text = get_args(hints[item.name])
        flag = f"--{item.name.replace('_', '-')}"
        if kind is bool:
            parser.add_argument(flag, action="store_true", help=text)
        elif get_origin(kind) is Literal:
            parser.add_argument(flag, default=item.default, choices=get_args(kind), help=text)
        else:
            parser.add_argument(flag, default=item.default, type=kind, help=text)
    try:
        return Settings(**vars(parser.parse_args(argv)))
    except ValueError as error:
        parser.error(str(error))


def main() -> None:
    settings = parse()
    try:
        print_record(run(settings))
    except (grpc.RpcError, httpx.HTTPError) as error:
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
        sys.exit(f"no answer from {settings.address or ADDRESSES[settings.api]}: {reason}")
    except StartError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
