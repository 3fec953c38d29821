"""A hundred process starts of a worker: the tables of a router have room for those that live, and for nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from millrace.v1.worker_pb2 import CacheChange
from millrace_common.metrics import ROUTER, Metrics
from millrace_common.page_hash import BLOCK_BYTES
from millrace_common.reasons import Reason
from millrace_router.config import Resilience
from millrace_router.health.workers import WorkerHealth
from millrace_router.policy.kv_index import SHARDS, KvIndex
from millrace_router.policy.prefix_index import PrefixIndex
from prometheus_client import CollectorRegistry
from router.fake_worker import DECODE, PREFILL, FakeWorker
from router.harness import Cluster

STARTS = 100


def test_records_and_ejections() -> None:
    health = WorkerHealth(Resilience(), Metrics(ROUTER, CollectorRegistry()))
    for start in range(STARTS):
        epoch = f"epoch {start}"
        health.keep({epoch: "decode"}, [frozenset({epoch})])
        for _ in range(20):
            health.failed([epoch], Reason.WORKER_LOST)
        assert len(health._records) == len(health._roles["decode"]) == 1
        assert health._ejected.keys() <= {epoch}


def blocks_of(numbers: Iterable[int]) -> list[bytes]:
    return [number.to_bytes(BLOCK_BYTES, "little") for number in numbers]


def test_the_blocks_and_bits_of_the_kv_index() -> None:
    """A start's blocks stay until the index was cleaned once, two of its shards with every change."""
    index = KvIndex()
    blocks, most = 40, 0
    for start in range(STARTS):
        holder = (f"epoch {start}", 0)
        stored = blocks_of(range(start * blocks, (start + 1) * blocks))
        index.apply(holder, CacheChange(snapshot=True, sequence=1, stored=stored, host_stored=stored))
        for sequence in range(1, SHARDS):
            index.apply(holder, CacheChange(after=sequence, sequence=sequence + 1))
        most = max(most, len(index))
        index.forget(holder)
        assert not index._sequences and not list(index._bits) and index._bits.live == 0
        assert index._bits.dead.bit_length() <= 3
    assert most <= 3 * blocks


def test_the_holders_of_the_prefix_index() -> None:
    index = PrefixIndex(1000)
    for start in range(STARTS):
        holder = (f"epoch {start}", 0)
        index.note(blocks_of(range(40)), [holder])
        assert index.lookup(blocks_of(range(40))) == {holder: 40}
        index.keep(set())
        assert index.lookup(blocks_of(range(40))) == {} and not list(index._bits)


async def test_workers_links_hooks_and_feeds(cluster: Callable) -> None:
    prefill, decode = FakeWorker(PREFILL), FakeWorker(DECODE)
    made: Cluster = await cluster(prefill, decode, prefill_policy="kv_aware", decode_policy="kv_aware")
    registry = made.router.registry
    for start in range(STARTS // 10):
        worker = (prefill, decode)[start % 2]
        await worker.restart()
        living = {prefill.epoch, decode.epoch}
        await made.until(lambda living=living: registry._routable == living, 20)
    assert (await made.generate([1, 2, 3])).error is None
    hooks = registry.hooks
    for table in (hooks.ready, hooks.progress, hooks._tasks, hooks._warming):
        assert len(table) == 1
    for table in (registry.workers, registry._feeds._feeds, registry.health._records, hooks._freezers):
        assert len(table) == 2
    assert not registry._leaving and len(registry._tasks) == 2
