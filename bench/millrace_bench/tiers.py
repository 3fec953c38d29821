"""The host tier of the prefix cache: how fast pages are copied, and what it gains beyond the device's own cache.

    copies   pages of the 671B model between a pool and the host tier: GB/s, adjacent and scattered pages
    steps    decode steps of an EP8 rank of that model beside copies: the most that the engine starts in a step, and as
             many as the bus carries
    passes   prompts of ten times the pool, twice, `--clients` at a time: hits and time to first token of the second
             pass, with and without the tier; on the simulated engine, whose prompts cost what those of the 671B model
             cost on an H200 but whose pages are 64 KiB, and on models/tiny

millrace bench tiers                     on a CPU
millrace bench tiers --device cuda       copies of a GPU, and passes of the tiny model on it
"""

import argparse
import random
import time
from collections.abc import Iterator
from typing import Any

import torch
from millrace_common.page_hash import BLOCK_BYTES
from millrace_load.options import CommandLine, form
from millrace_load.record import ROOT, Record, Row, Summary, print_record, print_row
from millrace_serve.engine.cache.changes import BlockChanges
from millrace_serve.engine.cache.kv_pool import KvLayout, KvPool
from millrace_serve.engine.config import GIB, EngineConfig, Role
from millrace_serve.engine.core import Request, RequestId, SamplingParams, Submit
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.offload.cuda_copier import CudaCopier
from millrace_serve.engine.offload.host_tier import HostTier
from millrace_serve.engine.offload.page_copier import STORE_BYTES, CopyJob, PageCopier
from millrace_serve.engine.sim.factory import build_sim_engine
from millrace_serve.engine.sim.runner import SimSettings
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.engine.step.device import Replay
from millrace_serve.model.parallel import ParallelDims

from millrace_bench import shard, v3
from millrace_bench.pools import model_pool
from millrace_bench.stamps import milliseconds, stamp

V3_PAGE = KvLayout(page_size=64, num_layers=61, dtype="bfloat16", latent_width=512, rope_width=64, model_hash="bench")
COSTS = SimSettings(step_s=0.012, token_s=85e-6, page_kv_bytes=1 << 16)
TIMES = 10  # of the pool
STEPS = {"cpu": ("4x256", 2), "cuda": ("64x4096", 61)}  # the step beside copies, and its layers
# Name, directions (True: to the host), how many jobs of each direction there are at least when a step starts. A job has
# the most pages that the engine stores at once.
COPIES = (("a store", (True,), 1), ("a store and a load", (True, False), 1), ("always", (True, False), 64))


def copies(device: torch.device, counts: list[int], repeats: int) -> Iterator[Row]:
    """One row per direction, number of pages and their order."""
    most = 2 * max(counts)
    pool = KvPool.create(V3_PAGE, most, device)
    copier = CudaCopier(pool, most) if device.type == "cuda" else PageCopier(pool, most)
    for count in counts:
        for order in ("adjacent", "scattered"):
            places = [2 * index for index in range(count)] if order == "scattered" else list(range(count))
            for to_host in (True, False):
                seconds = [_copy(copier, places, to_host) for _ in range(repeats + 1)][1:]  # the first touches memory
                p50 = Summary.of(seconds).p50
                way, nbytes = "store" if to_host else "load", count * V3_PAGE.page_bytes
                yield {"way": way, "pages": count, "order": order, "ms": p50 * 1e3, "gb_per_s": nbytes / p50 / 1e9}
    copier.close()


def _copy(copier: PageCopier, places: list[int], to_host: bool) -> float:
    """Seconds until the end of the copy was seen."""
    job = _job(copier, places, to_host)
    started = time.perf_counter()
    copier.start(job)
    while not copier.poll():
        pass
    return time.perf_counter() - started


def _job(copier: PageCopier, places: list[int], to_host: bool) -> CopyJob:
    """Of these pages and the slots of the same numbers."""
    tier = HostTier(copier.num_slots, BlockChanges())
    every = [copy for block in range(places[-1] + 1) if (copy := tier.begin(block.to_bytes(BLOCK_BYTES)))]
    return CopyJob(to_host, places, [every[place] for place in places], lambda: None)


def steps(
    size: str, layers: int, repeats: int, device: torch.device, widths: dict[str, Any] | None = None
) -> Iterator[Row]:
    """One row per kind of copies: medians of steps without and beside them, in turns. `size`: BATCHxCONTEXT."""
    batch, context = map(int, size.split("x"))
    model = shard.build(shard.SHARDS["ep8"], layers, device, widths)
    pool = model_pool(model.config, batch * -(-context // shard.PAGE) + 1, torch.bfloat16, device)
    rows, inputs = pool.view(), shard.decode_step(model, batch, context, device)
    shard.fill(rows)
    replay = shard.capture(lambda: shard.logits(model, inputs, rows), device)
    most = min(max(STORE_BYTES // pool.layout.page_bytes, 1), pool.num_pages)
    copier = CudaCopier(pool, most) if device.type == "cuda" else PageCopier(pool, most)
    for kind, ways, ahead in COPIES:
        times: dict[bool, list[float]] = {False: [], True: []}
        copied = 0.0
        for beside in (False, True) * 3:
            before, started = _nbytes(copier), time.perf_counter()
            times[beside] += _steps(replay, copier, ways if beside else (), ahead, repeats, device)
            copied += (_nbytes(copier) - before) / (time.perf_counter() - started) / 3
        without, with_copies = (Summary.of(times[beside]).p50 for beside in (False, True))
        slower = with_copies / without - 1
        yield {
            "copies": kind,
            "step": size,
            "ms": without,
            "beside_ms": with_copies,
            "slower": slower,
            "gb_per_s": copied / 1e9,
        }
    copier.close()


def _steps(
    replay: Replay, copier: PageCopier, ways: tuple[bool, ...], ahead: int, repeats: int, device: torch.device
) -> list[float]:
    """Milliseconds of each step. Before one starts, copies are started until `ahead` of each way are under way."""
    times, under_way = [], 0
    for _ in range(repeats):
        under_way -= len(copier.poll())
        while under_way < ahead * len(ways):
            for to_host in ways:
                copier.start(_job(copier, list(range(copier.num_slots)), to_host))
            under_way += len(ways)
        begin = stamp(device)
        replay()
        end = stamp(device)
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # copies have streams of their own, and go on
        times.append(milliseconds(begin, end))
    while copier.busy:
        copier.poll()
    return times


def _nbytes(copier: PageCopier) -> int:
    return int(copier.counters["host_bytes/store"] + copier.counters["host_bytes/load"])


def passes(kind: str, engine: Engine, prompts: list[list[int]], clients: int) -> Row:
    """Of the second pass."""
    _run(engine, prompts, clients, 0)
    before = engine.load()
    ttft = Summary.of(_run(engine, prompts, clients, len(prompts)))
    after = engine.load()
    names = "prompt_tokens", "cached_tokens", "host_cached_tokens"
    tokens, hits, host = (after.counters[name] - before.counters[name] for name in names)
    engine.close()
    return {
        "engine": kind,
        "host_pages": after.host_pages_total,
        "device_hits": (hits - host) / tokens,
        "host_hits": host / tokens,
        "ttft_p50_ms": ttft.p50 * 1e3,
        "ttft_p99_ms": ttft.p99 * 1e3,
    }


def _run(engine: Engine, prompts: list[list[int]], clients: int, first_room: int) -> list[float]:
    """Seconds to the first token of each prompt; a client sends its next one when the last has ended."""
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    left = list(enumerate(prompts, start=first_room))[::-1]
    sent: dict[int, float] = {}
    ttft: list[float] = []
    for _ in range(clients):
        _send(engine, left, sent, params)
    while sent or engine.has_work() or engine.host.copier.busy:
        for output in engine.step().outputs:
            if output.first_index == 0:
                ttft.append(time.perf_counter() - sent[output.id.room])
            if output.finish is not None:
                del sent[output.id.room]
                _send(engine, left, sent, params)
    return ttft


def _send(engine: Engine, left: list[tuple[int, list[int]]], sent: dict[int, float], params: SamplingParams) -> None:
    if left:
        room, prompt = left.pop()
        sent[room] = time.perf_counter()
        engine.submit(Submit(Request(id=RequestId(room, 0), token_ids=prompt, sampling=params)))


def both(kind: str, args: argparse.Namespace) -> Iterator[Row]:
    """Rows without and with a tier that has room for all prompts."""
    rng = random.Random(0)
    full = args.length // 64
    pool = args.clients * (full + 1) + 1
    prompts = [[rng.randrange(16, 1000) for _ in range(args.length)] for _ in range(TIMES * pool // full)]
    limits = {"num_pages": pool, "max_model_len": args.length + 64, "max_running": args.clients}
    engine = _engine(kind, args.device, limits)
    room = 2 * TIMES * pool * engine.pool.layout.page_bytes
    yield passes(kind, engine, prompts, args.clients)
    yield passes(kind, _engine(kind, args.device, {**limits, "host_cache_gib": room / GIB}), prompts, args.clients)


def _engine(kind: str, device: str, limits: dict[str, Any]) -> Engine:
    config = EngineConfig.model_validate(limits)
    if kind == "simulated":
        return build_sim_engine(config, Role.UNIFIED, COSTS)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    folder = ROOT / "models" / "tiny"
    return load_rank(config, Role.UNIFIED, folder, ParallelDims(), torch.device(device), dtype).engine()


def main() -> None:
    parser = CommandLine("millrace bench tiers", __doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--pages", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--length", type=int, default=1000, help="tokens of a prompt")
    parser.add_argument(
        "--step", **form("BATCHxCONTEXT", keep=True), help="beside the copies (64x4096, on a CPU 4x256)"
    )
    parser.add_argument("--layers", type=int, help="layers of the rank whose steps are timed (61, on a CPU 2)")
    args = parser.parse_args()
    step, layers = STEPS[args.device]
    args.step, args.layers = args.step or step, args.layers or layers
    widths = None if args.device == "cuda" else v3.TINY
    results: dict[str, list[Row]] = {"copies": [], "steps": [], "passes": []}
    for name, rows in (
        ("copies", copies(torch.device(args.device), args.pages, args.repeats)),
        ("steps", steps(args.step, args.layers, args.repeats, torch.device(args.device), widths)),
        ("passes", (row for kind in ("simulated", "tiny") for row in both(kind, args))),
    ):
        for row in rows:
            print_row(name, **row)
            results[name].append(row)
    print_record(Record("tiers", vars(args), results))


if __name__ == "__main__":
    main()
