"""The borrowing side of a prefill worker: leading pages of a prompt come from the prefix cache of another worker.

Life of a loan, which is an import (imports.py) of one part:

1. `borrow`    the engine has the prompt and waits; a Fetch asks the lender. No part within OFFER_S: KvFailed, and the
               engine computes everything
2. the part    KvOffered; the engine queues the prompt and reserves pages for it when its turn comes
3. the reads   of the pages that our own prefix cache lacks, the release and its answer, all within `stall_s`
4. Done        KvArrived: the engine computes the rest. Over: KvFailed, and it computes all of it

A loan never fails its prompt. While reads of a failed loan are in flight the engine uses other pages (KvLate).
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from millrace.v1 import kv_pb2, prefill_pb2
from millrace_common.page_hash import page_hashes
from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError

from millrace_serve.engine.core import Failure, KvArrived, KvLate, KvOffered, KvReserved, SequenceOutput
from millrace_serve.handover.imports import Import, Imports
from millrace_serve.handover.pairing import check_layout
from millrace_serve.transfer.importer import KvImport
from millrace_serve.transfer.messages import ReadPages
from millrace_serve.worker.frontend import convert

OFFER_S = 0.25  # a lender that steps answers in milliseconds; a lost one must not cost more than it could have saved


@dataclass(slots=True)
class Loan(Import):
    asked_at: float = 0.0  # on time.monotonic
    offered_s: float = 0.0  # until the part came
    reserved_at: float = 0.0
    connects: bool = False  # it is the first one from this lender
    timer: asyncio.TimerHandle | None = None  # ends the loan


class Borrowing(Imports):
    def prepare(self, message: prefill_pb2.PrefillRequest) -> Loan | None:
        """The loan that a request of a router asks for, if there is any; a reference that is wrong is only counted."""
        prefix, token_ids, size = message.prefix, convert.token_ids(message.request), self._page_size
        num_pages = min(prefix.num_pages, (len(token_ids) - 1) // size)  # at least one token is computed
        if num_pages <= 0:
            return None
        try:
            check_layout(prefix.worker.fingerprint, prefix.worker.address, self._ranks)
        except MillraceError as error:
            self._count_failure(Failure(error.reason, error.message))
            return None
        blocks = page_hashes(token_ids[: num_pages * size], size, salt=message.request.cache_salt)
        machine = KvImport(convert.request_id(message.request.id), blocks, loan=True)
        peer = self._peers.get(prefix.worker.address, prefix.worker.epoch)
        wanted = kv_pb2.FetchPrefix(replica=prefix.replica, blocks=blocks)
        return Loan(machine, message.request.replica, peer, prefix=wanted)

    def borrow(self, loan: Loan) -> None:
        """The engine has the request and waits."""
        loan.asked_at = time.monotonic()
        self._begin(loan)
        self._limit(loan, OFFER_S, f"nothing was offered within {OFFER_S:g} s")

    def on_reserved(self, reserved: KvReserved) -> None:
        job = self._live.get(reserved.id)
        if isinstance(job, Loan):
            job.reserved_at = time.monotonic()
            self._limit(job, self._stall_s, f"the pages were not here within {self._stall_s:g} s")
        super().on_reserved(reserved)

    def _limit(self, job: Loan, seconds: float, why: str) -> None:
        if job.timer is not None:
            job.timer.cancel()
        failure = Failure(Reason.STALLED, f"worker {job.peer.address}: {why}")
        job.timer = asyncio.get_running_loop().call_later(seconds, lambda: self._do(job, job.machine.on_abort(failure)))

    def _offer(self, job: Import) -> None:
        assert isinstance(job, Loan) and job.timer is not None
        job.timer.cancel()
        job.offered_s = time.monotonic() - job.asked_at
        self._ranks.send(job.replica, KvOffered(job.machine.id, job.machine.num_offered))

    def _done(self, job: Import, first: SequenceOutput | None) -> None:
        assert isinstance(job, Loan)
        num_pages = sum(read.num_pages for read in job.reads.values())
        if num_pages:
            seconds = job.offered_s + time.monotonic() - job.reserved_at
            self._metrics.loan.observe(seconds)
            self._metrics.loan_pages.labels(direction="borrowed").inc(num_pages)
            self._spans.borrowed(job.machine.id, num_pages)
            if not job.connects:
                self._board.borrowed(seconds - sum(read.took_s for read in job.reads.values()))
        self._ranks.send(job.replica, KvArrived(job.machine.id))
        self._forget(job)

    def _read(self, job: Import, read: ReadPages) -> None:
        assert isinstance(job, Loan)
        known = len(job.peer.agents)
        super()._read(job, read)
        job.connects |= len(job.peer.agents) > known

    def _give_up(self, job: Import, failure: Failure) -> None:
        job.told = True
        self._ranks.send(job.replica, KvLate(job.machine.id))

    def _count_failure(self, failure: Failure) -> None:
        self._metrics.loan_failures.labels(reason=failure.reason).inc()

    def _forget(self, job: Import) -> None:
        assert isinstance(job, Loan)
        if job.timer is not None:
            job.timer.cancel()
        super()._forget(job)
