"""Following the prefix caches of the workers (WorkerService.WatchCache) for the KV index.

1. A worker that is linked gets a feed: a snapshot of each replica, then changes.
2. A gap in the sequence numbers, or a broken stream: the worker's replicas are forgotten, and the feed starts again
   with a snapshot.
3. The Link is gone: the feed ends, and its data is dropped.
"""

import asyncio
import logging
from collections.abc import Iterable

import grpc
from millrace.v1 import worker_pb2
from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason
from millrace_rpc.client import reply
from millrace_rpc.errors import FieldError, MillraceError

from millrace_router.fleet.link import Link
from millrace_router.fleet.worker import Worker
from millrace_router.policy.kv_index import KvIndex

log = logging.getLogger(__name__)

PAUSE_S = 0.5  # before a broken feed starts again


class CacheFeeds:
    def __init__(self, index: KvIndex | None, metrics: Metrics) -> None:
        """Without an index, no worker is followed."""
        self._index = index
        self._metrics = metrics
        self._feeds: dict[Link, asyncio.Task[None]] = {}

    def reconcile(self, workers: Iterable[Worker]) -> None:
        if self._index is None:
            return
        linked = {worker.link: worker for worker in workers if worker.link is not None}
        for link in self._feeds.keys() - linked.keys():
            self._feeds.pop(link).cancel()
        for link in linked.keys() - self._feeds.keys():
            self._feeds[link] = asyncio.create_task(self._feed(self._index, linked[link]))
        self._metrics.cache_feeds.set(len(self._feeds))

    def stop(self) -> None:
        for task in self._feeds.values():
            task.cancel()

    async def _feed(self, index: KvIndex, worker: Worker) -> None:
        """Follow the worker until cancelled."""
        epoch = worker.epoch
        while True:
            why, replicas = "", set[int]()
            try:
                await self._follow(index, worker, epoch, replicas)
            except Exception as error:  # also garbage of the worker's, or a fault of ours: nobody would follow it again
                why = MillraceError.of(error, log, "the cache feed of %s broke unexpectedly", worker.address).message
            finally:
                for replica in replicas:
                    index.forget((epoch, replica))
            if why:
                log.info("cache feed of %s broke: %s", worker.address, why)
                await asyncio.sleep(PAUSE_S)

    async def _follow(self, index: KvIndex, worker: Worker, epoch: str, replicas: set[int]) -> None:
        """One stream until its first gap; adds to `replicas`. Raises MillraceError if it ends before."""
        call = worker.control.WatchCache(worker_pb2.WatchCacheRequest())
        try:
            while (message := await reply(call.read())) is not grpc.aio.EOF:
                for change in message.changes:
                    if change.replica >= worker.info.replicas:
                        text = f"is {change.replica}; the worker has {worker.info.replicas}"
                        raise FieldError(("changes", "replica"), text)
                    replicas.add(change.replica)
                    if change.snapshot:
                        self._metrics.cache_snapshots.inc()
                    if not index.apply((epoch, change.replica), change):
                        self._metrics.cache_gaps.inc()
                        return
                self._metrics.cache_blocks.set(len(index))
        finally:
            call.cancel()
        raise MillraceError(Reason.WORKER_LOST, "the worker ended its cache stream")
