"""The fetching side of a worker: leading pages of a prompt come from the prefix cache of another worker.

Life of a prefix fetch, which is an import (imports.py) of one chunk:

1. `begin_fetch`    the engine has the prompt and waits; a Fetch asks the source. No chunk within OFFER_S: KvFailed, and
               the engine computes everything
2. the chunk    KvOffered; the engine queues the prompt and reserves pages for it when its turn comes
3. the reads   of the pages that our own prefix cache lacks, the release and its answer, all within `stall_s`
4. Done        KvArrived: the engine computes the rest. Over: KvFailed, and it computes all of it

A prefix fetch never fails its prompt. While reads of a failed prefix fetch are in flight the engine uses other pages
(KvLate). That holds for a prompt that has ended, too: its slot must not wait for a lost worker.
"""

import asyncio
import time
from dataclasses import dataclass

from millrace.v1 import kv_pb2, prefill_pb2
from millrace_common.page_hash import page_hashes
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.core import Failure, KvArrived, KvLate, KvOffered, RequestId, SequenceOutput
from millrace_serve.handover.imports import Import, Imports, ImportUse
from millrace_serve.handover.pairing import check_layout
from millrace_serve.handover.peers import Peers
from millrace_serve.transfer.importer import KvImport
from millrace_serve.worker.frontend import convert
from millrace_serve.worker.frontend.frontend import Frontend

OFFER_S = 0.25  # a source that steps answers in milliseconds; a lost one must not cost more than it could have saved


@dataclass(slots=True)
class PrefixFetchTimes:
    """On time.monotonic."""

    asked_at: float
    offered_s: float = 0.0  # until the chunk came
    reserved_at: float = 0.0


class PrefixFetches(ImportUse):
    """Prompts that are computed here."""

    def __init__(self, frontend: Frontend, peers: Peers, imports: Imports) -> None:
        self._imports, self._peers, self._ranks = imports, peers, frontend.ranks
        self._metrics, self._spans, self._board = frontend.metrics, frontend.spans, frontend.board
        self._limits, self._stall_s = frontend.config.limits, frontend.config.timeouts.stall
        self._times: dict[RequestId, PrefixFetchTimes] = {}
        self._timers: dict[RequestId, asyncio.TimerHandle] = {}  # each ends its prefix fetch

    def prepare(self, message: prefill_pb2.PrefillRequest) -> Import | None:
        """The prefix fetch that a request asks for, if there is any; a reference that is wrong is only counted."""
        if not (prefix := message.prefix).num_pages:
            return None  # before the prompt is unpacked
        token_ids, size = convert.token_ids(message.request, self._limits.max_model_len), self._limits.page_size
        num_pages = min(prefix.num_pages, (len(token_ids) - 1) // size)  # at least one token is computed
        if num_pages <= 0:
            return None
        try:
            check_layout(prefix.worker.fingerprint, prefix.worker.address, self._ranks)
        except MillraceError as error:
            self._count_failure(error.reason)
            return None
        blocks = page_hashes(token_ids[: num_pages * size], size, salt=message.request.cache_salt)
        machine = KvImport(convert.request_id(message.request.id), blocks, prefix_fetch=True)
        peer = self._peers.get(prefix.worker.address, prefix.worker.epoch)
        wanted = kv_pb2.FetchPrefix(replica=prefix.replica, blocks=blocks)
        return Import(machine, self, message.request.replica, peer, prefix=wanted)

    def begin_fetch(self, prefix_fetch: Import) -> None:
        """The engine has the request and waits."""
        self._times[prefix_fetch.machine.id] = PrefixFetchTimes(time.monotonic())
        self._imports.begin(prefix_fetch)
        self._limit(prefix_fetch, OFFER_S, f"nothing was offered within {OFFER_S:g} s")

    def offered(self, job: Import) -> None:
        times = self._times[job.machine.id]
        times.offered_s = time.monotonic() - times.asked_at
        self._timers[job.machine.id].cancel()
        self._ranks.send(job.replica, KvOffered(job.machine.id, job.machine.num_offered))

    def reserved(self, job: Import) -> None:
        self._times[job.machine.id].reserved_at = time.monotonic()
        self._limit(job, self._stall_s, f"the pages were not here within {self._stall_s:g} s")

    def done(self, job: Import, first: SequenceOutput | None) -> None:
        times = self._times[job.machine.id]
        if num_pages := job.num_read:
            seconds = times.offered_s + time.monotonic() - times.reserved_at
            self._metrics.prefix_fetch.observe(seconds)
            self._metrics.prefix_fetch_pages.labels(direction="fetched").inc(num_pages)
            self._spans.fetched(job.machine.id, num_pages)
            if not job.connects:
                self._board.fetched(seconds - sum(read.took_s for read in job.reads.values()))
        self._ranks.send(job.replica, KvArrived(job.machine.id))

    def given_up(self, job: Import, failure: Failure) -> None:
        job.told = True
        self._ranks.send(job.replica, KvLate(job.machine.id))

    def over(self, job: Import) -> None:
        del self._times[job.machine.id]
        self._timers.pop(job.machine.id).cancel()
        if failure := job.machine.failure:
            self._count_failure(failure.reason)

    def _limit(self, job: Import, seconds: float, why: str) -> None:
        if timer := self._timers.get(job.machine.id):
            timer.cancel()
        failure = Failure(Reason.STALLED, f"worker {job.peer.address}: {why}")
        self._timers[job.machine.id] = asyncio.get_running_loop().call_later(seconds, self._imports.fail, job, failure)

    def _count_failure(self, reason: str) -> None:
        self._metrics.prefix_fetch_failures.labels(reason=reason).inc()
