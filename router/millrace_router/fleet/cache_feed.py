"""Following the prefix caches of the workers (WorkerService.WatchCache) for the KV index.

1. A worker that is linked gets a feed: a snapshot of each replica, then changes.
2. A gap in the sequence numbers, or a broken stream: the worker's replicas are forgotten, and the feed starts again
   with a snapshot.
3. The Link is gone: the feed ends, and its data is dropped.

A stale index costs a wrong guess, never a wrong answer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

import grpc
from millrace.v1 import worker_pb2
from millrace_common.metrics import Metrics
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_router.fleet.link import Link
from millrace_router.fleet.worker import Worker
from millrace_router.policy.kv_index import Change, KvIndex

log = logging.getLogger(__name__)

PAUSE_S = 0.5  # before a broken feed starts again


class CacheFeeds:
    def __init__(self, index: KvIndex | None, metrics: Metrics) -> None:
        """Without an index, no worker is followed."""
        self._index = index
        self._metrics = metrics
        self._feeds: dict[Link, tuple[_Feed, asyncio.Task[None]]] = {}

    def reconcile(self, workers: Iterable[Worker]) -> None:
        if self._index is None:
            return
        linked = {worker.link: worker for worker in workers if worker.link is not None}
        for link in self._feeds.keys() - linked.keys():
            feed, task = self._feeds.pop(link)
            task.cancel()
            feed.forget()
        for link in linked.keys() - self._feeds.keys():
            feed = _Feed(self._index, linked[link], self._metrics)
            self._feeds[link] = feed, asyncio.create_task(feed.run())
        self._metrics.cache_feeds.set(len(self._feeds))

    def stop(self) -> None:
        for _, task in self._feeds.values():
            task.cancel()


class _Feed:
    def __init__(self, index: KvIndex, worker: Worker, metrics: Metrics) -> None:
        self._index = index
        self._worker = worker
        self._epoch = worker.epoch
        self._metrics = metrics
        self._replicas: set[int] = set()

    async def run(self) -> None:
        """Run until cancelled, or until the worker turns out not to have the call."""
        while True:
            try:
                await self._follow()
                why = ""
            except grpc.aio.AioRpcError as error:
                why = error.details() or str(error.code())
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    log.warning("worker %s has no WatchCache: its prefix caches are unknown", self._worker.address)
                    return
            except MillraceError as error:
                why = error.message
            self.forget()
            if why:
                log.info("cache feed of %s broke: %s", self._worker.address, why)
                await asyncio.sleep(PAUSE_S)

    def forget(self) -> None:
        for replica in self._replicas:
            self._index.forget((self._epoch, replica))
        self._replicas.clear()

    async def _follow(self) -> None:
        """One stream, until its first gap. Raises AioRpcError or MillraceError when it ends before."""
        call = self._worker.control.WatchCache(worker_pb2.WatchCacheRequest())
        try:
            while (message := await call.read()) is not grpc.aio.EOF:
                for change in message.changes:
                    if not self._apply(change):
                        self._metrics.cache_gaps.inc()
                        return
        finally:
            call.cancel()
        raise MillraceError(Reason.WORKER_LOST, "the worker ended its cache stream")

    def _apply(self, wire: worker_pb2.CacheChange) -> bool:
        self._replicas.add(wire.replica)
        if wire.snapshot:
            self._metrics.cache_snapshots.inc()
        change = Change(wire.after, wire.sequence, wire.stored, wire.removed, wire.snapshot)
        return self._index.apply((self._epoch, wire.replica), change)
