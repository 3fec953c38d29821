"""What a routing decision costs: time with many workers and a filled index, and the memory of a large index.

1. For every policy (on both roles): `workers` workers, half of them prefill, half decode, all warmed as pairs. The
   index holds `blocks` blocks: `prompts` prompts of `tokens` tokens that share their first quarter in groups, each on
   two workers of a role. Then `requests` decisions through the Placer, as the router makes them: look up the prompt,
   score, keep the decision, note the prompt. After each, one worker reports another load. Given is the thread's CPU
   time; elapsed time is beside it, and larger where the machine has other work.
2. Hashing a prompt's pages, which happens once per request.
3. Both indexes filled with `memory_blocks` blocks, one holder each: bytes per block (tracemalloc), and how many blocks
   per second a KV index takes from the workers' reports.
"""

import gc
import random
import time
import tracemalloc
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any

from millrace.v1.worker_pb2 import CacheChange
from millrace_common.page_hash import BLOCK_BYTES, page_hashes
from millrace_common.step_times import StepTimes
from millrace_load.options import CommandLine, add_options, number
from millrace_load.record import Record, Summary, print_record, print_row, printed
from millrace_router.config import Policy, RouterConfig, Routing, SloConfig
from millrace_router.flow.metrics import build
from millrace_router.policy.kv_index import KvIndex
from millrace_router.policy.placer import Placer
from millrace_router.policy.prefix_index import PrefixIndex
from millrace_router.policy.snapshot import PlacementRequest, Replica, View

PAGE_SIZE = 64
TIMES = StepTimes(fixed_s=0.018, sequence_s=1e-4, key_s=2e-8, chunk_s=0.008, token_s=4e-5, pair_s=1e-9)


@dataclass(frozen=True, slots=True)
class Settings:
    workers: Annotated[int, "workers, half prefill and half decode"] = 64
    replicas: Annotated[int, "replicas of each worker"] = 1
    blocks: Annotated[int, "blocks in the index while decisions are timed"] = 100_000
    tokens: Annotated[int, "tokens of a prompt"] = 4096
    requests: Annotated[int, "decisions for each policy"] = 2000
    memory_blocks: Annotated[int, "blocks of the memory measurement"] = 1_000_000
    seed: Annotated[int, "seed of all that is drawn", number(int)] = 1


def run(settings: Settings) -> Record:
    rows = [_decisions(settings, policy, limits) for policy in Policy for limits in _limits(policy)]
    tokens = list(range(settings.tokens))
    results = {
        "decisions": rows,
        "worst_p99_us": max(row["us"]["p99"] for row in rows),
        "hash_us": asdict(Summary.of([_micros(lambda: page_hashes(tokens, PAGE_SIZE)) for _ in range(200)])),
        "memory": [_memory(settings, "kv", _fill_kv), _memory(settings, "prefix", _fill_prefix)],
    }
    gc.unfreeze()
    return Record("policy", asdict(settings), results)


def _limits(policy: Policy) -> tuple[bool, ...]:
    """Predicted times instead of the policy, where they ask the most: all replicas and the index."""
    return (False, True) if policy is Policy.KV_AWARE else (False,)


# ------------------------------------------------------------------------------------- decisions


def _decisions(s: Settings, policy: Policy, limits: bool) -> dict[str, Any]:
    rng = random.Random(s.seed)
    slo = SloConfig(ttft=1.0, tpot=0.04) if limits else SloConfig()
    routing = Routing(slo=slo, prefix_blocks=s.blocks)
    config = RouterConfig(model="", prefill_policy=policy, decode_policy=policy, routing=routing)
    placer, view = Placer(config, build()), _view(s, rng)
    prompts = _fill(s, placer, view, rng)
    times, elapsed = [], []
    gc.collect()
    gc.freeze()  # as the router does when it is ready
    for i in range(s.requests):
        pages = rng.choice(prompts) if i % 4 else _pages(rng, s.tokens // PAGE_SIZE)
        want = PlacementRequest(
            s.tokens, slo=slo.slo, session=f"user {i % 500}", pages=pages, page_size=PAGE_SIZE, draw=rng.getrandbits(64)
        )
        start, start_cpu = time.perf_counter_ns(), time.thread_time_ns()
        placer.choose(view, want)
        times.append((time.thread_time_ns() - start_cpu) / 1e3)
        elapsed.append((time.perf_counter_ns() - start) / 1e3)
        view = _report(view, rng)
    return {
        "policy": str(policy),
        "limits": limits,
        "us": asdict(Summary.of(times)),
        "max_us": max(times),
        "elapsed_us": asdict(Summary.of(elapsed)),
    }


def _view(s: Settings, rng: random.Random) -> View:
    def role(name: str, sources: frozenset[str]) -> tuple[Replica, ...]:
        addresses = sorted(f"10.0.{name}.{i}:50051" for i in range(s.workers // 2))
        return tuple(
            Replica(
                address=address,
                index=index,
                epoch=f"{name}/{address}",
                fingerprint="layout",
                capacity=64,
                tokens=rng.randrange(20_000),
                sequences=(sequences := rng.randrange(32)),
                streams=sequences,
                times=TIMES,
                sources=sources,
                labels={"zone": f"z{i % 2}", "rack": f"r{i % 8}", "host": f"h{i}"},
            )
            for i, address in enumerate(addresses)
            for index in range(s.replicas)
        )

    prefill = role("1", frozenset())
    return View(prefill, role("2", frozenset(replica.epoch for replica in prefill)))


def _report(view: View, rng: random.Random) -> View:
    """One worker of each role reports: the router makes that one's snapshot again."""

    def changed(replicas: tuple[Replica, ...]) -> tuple[Replica, ...]:
        i = rng.randrange(len(replicas))
        new = replace(replicas[i], tokens=rng.randrange(20_000), sequences=rng.randrange(32))
        return (*replicas[:i], new, *replicas[i + 1 :])

    return View(changed(view.prefill), changed(view.decode))


def _fill(s: Settings, placer: Placer, view: View, rng: random.Random) -> list[tuple[bytes, ...]]:
    """Prompts until the index has its blocks; each is known to be on two workers of each role."""
    length, shared, blocks = s.tokens // PAGE_SIZE, s.tokens // PAGE_SIZE // 4, 0
    prompts: list[tuple[bytes, ...]] = []
    prefix: tuple[bytes, ...] = ()
    while blocks < s.blocks:
        if len(prompts) % 8 == 0:
            prefix = _pages(rng, shared)
            blocks += shared
        prompts.append(prefix + _pages(rng, length - shared))
        blocks += length - shared
    sequences: dict[tuple[str, int], int] = {}
    for prompt in prompts:
        for replica in (*rng.sample(view.prefill, 2), *rng.sample(view.decode, 2)):
            if placer.indexes.prefix is not None:
                placer.indexes.prefix.note(prompt, [replica.process])
            if placer.indexes.kv is not None:
                number = sequences.get(replica.process, 0)
                change = CacheChange(
                    after=number, sequence=number + 1, stored=prompt, snapshot=replica.process not in sequences
                )
                assert placer.indexes.kv.apply(replica.process, change)
                sequences[replica.process] = number + 1
    return prompts


def _pages(rng: random.Random, count: int) -> tuple[bytes, ...]:
    return tuple(rng.randbytes(BLOCK_BYTES) for _ in range(count))


def _micros(call: Callable[[], object]) -> float:
    start = time.perf_counter_ns()
    call()
    return (time.perf_counter_ns() - start) / 1e3


# ------------------------------------------------------------------------------------- memory


def _memory(s: Settings, name: str, fill: Callable[[Settings], object]) -> dict[str, object]:
    """Twice: for the time, and again under tracemalloc, which is slow."""
    start = time.perf_counter()
    fill(s)
    seconds = time.perf_counter() - start
    gc.collect()
    tracemalloc.start()
    index = fill(s)
    size, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    blocks = len(index)  # type: ignore[arg-type]
    return {"index": name, "blocks": blocks, "bytes_per_block": size / blocks, "blocks_per_s": blocks / seconds}


def _fill_kv(s: Settings) -> KvIndex:
    rng, index = random.Random(s.seed), KvIndex()
    per_change = 64
    for each in range(s.memory_blocks // per_change):
        replica, turn = each % s.workers, each // s.workers
        blocks = _pages(rng, per_change)
        index.apply((f"e{replica}", 0), CacheChange(after=turn, sequence=turn + 1, stored=blocks, snapshot=turn == 0))
    return index


def _fill_prefix(s: Settings) -> PrefixIndex:
    rng, index = random.Random(s.seed), PrefixIndex(s.memory_blocks)
    for each in range(s.memory_blocks // 64):
        index.note(_pages(rng, 64), [(f"e{each % s.workers}", 0)])
    return index


def main() -> None:
    parser = CommandLine("millrace bench policy")
    add_options(parser, Settings)
    record = run(Settings(**vars(parser.parse_args())))
    printed((*record.results["decisions"], *record.results["memory"]))
    print_row("hash_us", **record.results["hash_us"])
    print_record(record)


if __name__ == "__main__":
    main()
