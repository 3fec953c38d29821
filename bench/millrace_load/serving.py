"""Loads a running Millrace, or one of its own, like many clients.

    millrace bench serving --self-serve --num-requests 200 --concurrency 16          closed loop
    millrace bench serving --address 127.0.0.1:50051 --request-rate 20               open loop, Poisson arrivals
    millrace bench serving --self-serve --multi-turn 10 --input-len 500 --output-len 100 --ignore-eos --concurrency 2
    millrace bench serving --trace conversation_trace.jsonl --speed 4                at the recorded times
    millrace bench serving --sharegpt sharegpt.json --multi-turn 5 --think-time lognormal:3:1
    millrace bench serving --batches 1 2 4 8 --input-len 1024 --output-len 64        one batch at a time

1. Read the trace, if any. 2. Plan: draw all requests from the seed, or take the recorded ones. 3. Send the warm-up
requests; they are not counted. 4. Send the others: in the closed loop each of `concurrency` clients begins its next
conversation when the last one ended; in the open loop conversations begin when they are due, whether or not earlier
ones have ended. A conversation has one request, or with --multi-turn several: each prompt is all that was said before,
with the answers that the server gave, and what is new. 5. Print the tables, then one JSON line.
"""

import asyncio
import contextlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import grpc
import httpx
from millrace_cli.cluster import ClusterSpec, LocalCluster, StartError
from millrace_common import gc_hooks
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from millrace_load import serving_batches, traces
from millrace_load.clients import Client, GrpcClient, HttpClient, Options, Sample, Target
from millrace_load.plots import draw, points
from millrace_load.record import Record, print_record, printed
from millrace_load.replay import Replay, Session
from millrace_load.report import Report, Slo, by_turn, latency_table, throughput_table, turn_table
from millrace_load.sending import send
from millrace_load.serving_options import Settings, parse
from millrace_load.workload import Distribution, Plan, SharedPrefix, Workload, WorkloadError

ADDRESSES = {"grpc": "127.0.0.1:50051", "http": "http://127.0.0.1:8000"}


@dataclass(frozen=True, slots=True)
class Run:
    target: Target  # what was loaded
    plan: Plan
    samples: list[Sample]  # of the counted requests


def run(settings: Settings, console: Console | None = None) -> Record:
    """Load the target and print the tables; the record is what the JSON line holds."""
    console = console or Console(stderr=True, highlight=False)
    if settings.batches:
        return _run_batches(settings, console)
    done = asyncio.run(collect(settings, console))
    slo = Slo.parse(settings.slo)
    report, turns = Report.of(done.samples, slo, settings.gpus), by_turn(done.samples, slo)
    console.print(latency_table(report), throughput_table(report, slo))
    if len(turns) > 1:
        console.print(turn_table(turns))
    missing = {"left_out": done.plan.left_out, "unsent": done.plan.num_requests - len(done.samples)}
    if any(missing.values()):
        console.print("{left_out} requests left out: longer than the context; {unsent} unsent".format(**missing))
    results = report.as_dict() | missing | {"turns": [turn.of_turn() for turn in turns] if len(turns) > 1 else []}
    record = Record("serving", asdict(settings) | {"target": asdict(done.target)}, results)
    if settings.plot:
        draw(points(asdict(record)), Path(settings.plot))
    return record


def _run_batches(settings: Settings, console: Console) -> Record:
    target, rows = asyncio.run(collect_batches(settings, console))
    printed(map(asdict, rows))
    return Record("serving", asdict(settings) | {"target": asdict(target)}, {"batches": [asdict(row) for row in rows]})


async def collect_batches(settings: Settings, console: Console) -> tuple[Target, list[serving_batches.Row]]:
    """`rounds` batches of each size, each sent when the one before has ended."""
    async with _connected(settings, console) as (client, target):
        warmup = _workload(settings, target, stream=1).plan(settings.warmup)  # one turn each
        await send(client, warmup, settings.concurrency, lambda: None)
        workload = _workload(settings, target, stream=0)
        sizes = [size for size in settings.batches for _ in range(settings.rounds)]
        with progress(console) as begin:
            done = begin("requests", sum(sizes))
            return target, await serving_batches.measure(client, workload, sizes, done)


@contextlib.asynccontextmanager
async def _connected(settings: Settings, console: Console) -> AsyncIterator[tuple[Client, Target]]:
    async with contextlib.AsyncExitStack() as stack:
        address = await stack.enter_async_context(_address(settings, console))
        options = Options(settings.temperature, settings.ignore_eos)
        client = HttpClient(address, options) if settings.api == "http" else GrpcClient(address, options)
        stack.push_async_callback(client.close)
        yield client, await client.target()


async def collect(settings: Settings, console: Console) -> Run:
    """WorkloadError for a trace that cannot be read or sent."""
    sessions: list[Session] = []
    if settings.trace:
        sessions = traces.read_trace(Path(settings.trace), settings.num_requests)
    if settings.sharegpt:
        sessions = traces.read_sharegpt(Path(settings.sharegpt), settings.num_requests, settings.multi_turn)
    async with _connected(settings, console) as (client, target):
        plan = await _plan(settings, sessions, client, target)
        warmup = replace(_workload(settings, target, stream=1), turns=1).plan(settings.warmup)
        most = settings.max_concurrency or None
        with progress(console) as begin:
            await send(client, warmup, settings.concurrency, begin("warm-up", warmup.num_requests))
            gc_hooks.freeze()  # collections of this process would count as gaps of the server
            samples = await send(client, plan, settings.concurrency, begin("requests", plan.num_requests), most)
        return Run(target, plan, samples)


async def _plan(settings: Settings, sessions: list[Session], client: Client, target: Target) -> Plan:
    workload, most = _workload(settings, target, stream=0), target.max_context
    if sessions:
        num_tokens = await _num_tokens(client, sessions, too_many=most + 1)
        replay = Replay(num_tokens, workload.vocab_size, workload.think, most, settings.seed, settings.speed)
        plan = replay.plan(sessions)
    else:
        plan = workload.plan(settings.num_requests)
    return plan.arriving(settings.request_rate, settings.seed) if settings.request_rate > 0 else plan


def _workload(settings: Settings, target: Target, stream: int) -> Workload:
    """Streams have different prompts, so that the warm-up does not fill the prefix cache for the rest."""
    return Workload(
        turns=settings.multi_turn,
        input_len=Distribution.lengths(settings.input_len),
        output_len=Distribution.lengths(settings.output_len),
        think=Distribution.times(settings.think_time),
        prefix=SharedPrefix.parse(settings.shared_prefix),
        vocab_size=0 if settings.text else target.vocab_size,
        max_context=target.max_context,
        seed=2 * settings.seed + stream,
    )


async def _num_tokens(client: Client, sessions: list[Session], too_many: int) -> dict[str, int]:
    """Of every text, as the router's tokenizer counts them, the token that begins a sequence included."""
    found: dict[str, int] = {}
    for session in sessions:
        texts = [it for turn in session.everything() for it in (turn.said, turn.answer) if isinstance(it, str)]
        for text, count in zip(texts, await asyncio.gather(*map(client.num_tokens, texts)), strict=True):
            found[text] = too_many if count is None else count
    return found


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
        worker_set=tuple(settings.worker_set),
        log_dir=Path(tempfile.mkdtemp(prefix="millrace-bench-")),
    )
    cluster = LocalCluster(spec)
    console.print(f"starting a system; logs in {cluster.log_dir}", style="dim")
    async with cluster:
        yield cluster.http_url if settings.api == "http" else cluster.grpc_address


@contextlib.contextmanager
def progress(console: Console, *, transient: bool = False) -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """Yields a function that begins a bar of a name and length, and returns what moves it by one."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=transient) as bars:

        def begin(name: str, total: int) -> Callable[[], None]:
            task = bars.add_task(name, total=total)
            return lambda: bars.advance(task)

        yield begin


def main() -> None:
    settings = parse()
    try:
        print_record(run(settings))
    except (grpc.RpcError, httpx.HTTPError) as error:
        reason = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
        sys.exit(f"no answer from {settings.address or ADDRESSES[settings.api]}: {reason}")
    except (StartError, WorkloadError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
