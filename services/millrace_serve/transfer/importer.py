"""The import of one request's KV into this worker's pool: a pure state machine, driven by the frontend. No I/O, no
clock.

It serves two ends. A decode worker imports a whole prompt, chunk by chunk while it is computed. A prefill worker
fetches a prefix: there is one chunk, which has some of the pages that it asked for and no first token.

A last chunk whose first token already ended the sequence leads to DONE as soon as nothing is in flight, from any state:
there is nothing to read for, and the exporter has taken the pages back.

Exactly one of Done and Over is emitted per import, and only when nothing is in flight. An event that does not fit (a
repeated chunk, a chunk after a gap, an unexpected answer) is refused and counted in `refused`; the state stays. A chunk
that contradicts the prompt (the hash of its tokens, the number of pages) fails the import.
"""

import collections
import enum
from collections.abc import Sequence

import msgspec
from millrace_common.reasons import Reason
from millrace_common.transitions import Transitions

from millrace_serve.engine.core import Failure, KvChunk, RequestId, SequenceOutput
from millrace_serve.transfer.messages import ReadPages


class ImportState(enum.StrEnum):
    WAITING = "waiting"  # nothing has arrived yet
    RESERVING = "reserving"  # the first chunk came, perhaps without pages: AskReserve was emitted, chunks are collected
    READING = "reading"  # our pages are known; those that our prefix cache lacks are read as their chunk arrives
    RELEASING = "releasing"  # the last chunk arrived and every read is done: AskRelease was emitted
    DRAINING = "draining"  # failed with reads in flight: no new ones start, and the last final one leads to OVER
    DONE = "done"  # the exporter answered that it held the pages: the data is good, Done was emitted
    OVER = "over"  # failed with nothing in flight: Over was emitted, our pages may be freed


MOVES = Transitions(
    {
        ImportState.WAITING: (ImportState.RESERVING, ImportState.DONE, ImportState.OVER),
        ImportState.RESERVING: (ImportState.READING, ImportState.DONE, ImportState.OVER),
        ImportState.READING: (ImportState.RELEASING, ImportState.DONE, ImportState.DRAINING, ImportState.OVER),
        ImportState.RELEASING: (ImportState.DONE, ImportState.OVER),
        ImportState.DRAINING: (ImportState.OVER,),
        ImportState.DONE: (),
        ImportState.OVER: (),
    }
)
_TAKES_CHUNKS = frozenset({ImportState.WAITING, ImportState.RESERVING, ImportState.READING})


class Refusal(enum.StrEnum):
    DUPLICATE_CHUNK = "duplicate_chunk"
    CHUNK_GAP = "chunk_gap"
    LATE = "late"  # the state no longer takes this event


class AskReserve(msgspec.Struct, frozen=True):
    """Ask our engine for pages (KvOffered); answer with `on_reserved`."""


class AskRelease(msgspec.Struct, frozen=True):
    """Send release to the exporter; answer with `on_release_confirmed`, or with the end of the stream. When it comes
    with Over, the answer does not matter: the import failed, and the pages need not be held.
    """


class Done(msgspec.Struct, frozen=True):
    """Send KvArrived to our engine."""

    first: SequenceOutput | None  # None: of a prefix fetch


class Over(msgspec.Struct, frozen=True):
    """Send KvFailed to our engine; no operation on our pages is in flight."""

    failure: Failure


Action = AskReserve | ReadPages | AskRelease | Done | Over


class KvImport:
    """`expected[i]` is the block of page i (millrace_common/page_hash.py); one per page of the prompt, or of the prefix
    that is fetched (`prefix_fetch`).
    """

    def __init__(self, id: RequestId, expected: Sequence[bytes], prefix_fetch: bool = False) -> None:
        self.id = id
        self._prefix_fetch = prefix_fetch
        self.state = ImportState.WAITING
        self.refused: collections.Counter[Refusal] = collections.Counter()
        self.failure: Failure | None = None  # set at the first failure; Over may come later
        self._expected = list(expected)
        self._offered = False  # a chunk came: the exporter has a lease for us
        self._src_pages: list[int] = []  # accepted so far, in page order
        self._dst_pages: list[int] = []
        self._num_asked = 0  # leading pages that are read, being read, or were cached
        self._outstanding: set[int] = set()
        self._num_reads = 0
        self._complete = False  # the last chunk came
        self._first: SequenceOutput | None = None  # of the last chunk

    def on_chunk(self, chunk: KvChunk) -> list[Action]:
        if refusal := self._refusal_of(chunk):
            return self._refuse(refusal)
        if self._prefix_fetch and not chunk.page_ids:
            return self.on_abort(Failure(Reason.KV_NOT_FOUND, f"{self.id}: no page of the prefix is cached there"))
        self._offered = True
        if problem := self._contradiction_in(chunk):
            return self.on_abort(Failure(Reason.KV_MISMATCH, f"{self.id}: {problem}"))
        self._src_pages += chunk.page_ids
        if chunk.last:
            self._complete, self._first = True, chunk.first
            del self._expected[len(self._src_pages) :]  # of a prefix fetch: what is not there
        if self._is_finished:
            return self._advance()
        if self.state is ImportState.WAITING:
            self._move(ImportState.RESERVING)
            return [AskReserve()]
        return self._advance()

    def on_stream_end(self) -> list[Action]:
        """The exporter's stream ended in good order: no further chunk and no answer to a release will come."""
        if self.state in MOVES.final or self.failure is not None or self._is_finished:
            return []
        have = f"{len(self._src_pages)} of {len(self._expected)} pages, {self.state}"
        return self.on_abort(Failure(Reason.TRANSFER_FAILED, f"{self.id}: the exporter's stream ended after {have}"))

    def on_reserved(self, page_ids: Sequence[int], num_cached_pages: int) -> list[Action]:
        """Our pages, one per page of the prompt or prefix; the first `num_cached_pages` already hold what we need."""
        if self.state is not ImportState.RESERVING:
            return self._refuse(Refusal.LATE)
        assert len(page_ids) == len(self._expected), f"{len(page_ids)} pages reserved for {len(self._expected)}"
        assert 0 <= num_cached_pages <= len(page_ids), f"{num_cached_pages} cached of {len(page_ids)} pages"
        self._dst_pages = list(page_ids)
        self._num_asked = num_cached_pages
        self._move(ImportState.READING)
        return self._advance()

    def on_read_done(self, read: int, error: str = "", corrupt: bool = False) -> list[Action]:
        """`read` is final: nothing of it is in flight. `error`: why it failed; `corrupt`: bytes changed on the way."""
        self._outstanding.remove(read)
        if error and not self._is_finished:
            reason = Reason.KV_MISMATCH if corrupt else Reason.TRANSFER_FAILED
            return self.on_abort(Failure(reason, f"{self.id}: {error}"))
        return self._drained() if self.state is ImportState.DRAINING else self._advance()

    def on_release_confirmed(self) -> list[Action]:
        """The exporter held the pages until the release."""
        return self._done() if self.state is ImportState.RELEASING else self._refuse(Refusal.LATE)

    def on_abort(self, failure: Failure) -> list[Action]:
        """The request was cancelled, the peer died, a read stalled, ...: the first failure is the one reported."""
        if self.state in MOVES.final:
            return self._refuse(Refusal.LATE)
        self.failure = self.failure or failure
        if self._outstanding and self.state is not ImportState.DRAINING:
            self._move(ImportState.DRAINING)
        return self._drained()

    def _refusal_of(self, chunk: KvChunk) -> Refusal | None:
        if self.state not in _TAKES_CHUNKS or self._complete:
            return Refusal.LATE
        if chunk.first_page < len(self._src_pages):
            return Refusal.DUPLICATE_CHUNK
        if chunk.first_page > len(self._src_pages):
            return Refusal.CHUNK_GAP
        return None

    def _contradiction_in(self, chunk: KvChunk) -> str | None:
        end = chunk.first_page + len(chunk.page_ids)
        total = len(self._expected)
        if len(chunk.fingerprints) != len(chunk.page_ids):
            return f"chunk has {len(chunk.page_ids)} pages but {len(chunk.fingerprints)} fingerprints"
        if end > total:
            return f"chunk ends at page {end}, the prompt has {total} pages"
        if self._prefix_fetch and not chunk.last:
            return "a prefix fetch has one chunk, and this is not its last one"
        if chunk.last and (self._prefix_fetch is not (chunk.first is None) or (end != total and chunk.first)):
            return f"last chunk ends at page {end} of {total}, {'with' if chunk.first else 'without'} a first token"
        expected = self._expected[chunk.first_page : end]
        for offset, (ours, theirs) in enumerate(zip(expected, chunk.fingerprints, strict=True)):
            if ours != theirs:
                page = chunk.first_page + offset
                return f"page {page} was computed from other tokens ({theirs.hex()}, expected {ours.hex()})"
        return None

    def _advance(self) -> list[Action]:
        """Emits the next action that is possible now."""
        if self._is_finished:
            return [] if self._outstanding else self._done()
        if self.state is not ImportState.READING:
            return []
        start, end = self._num_asked, len(self._src_pages)
        if start < end:
            self._num_asked = end
            read = self._num_reads
            self._num_reads += 1
            self._outstanding.add(read)
            return [ReadPages(self.id, read, self._src_pages[start:end], self._dst_pages[start:end])]
        if self._complete and not self._outstanding:
            self._move(ImportState.RELEASING)
            return [AskRelease()]
        return []

    @property
    def num_offered(self) -> int:
        """Pages of the exporter that have been announced."""
        return len(self._src_pages)

    @property
    def _is_finished(self) -> bool:
        return self._first is not None and self._first.finish is not None

    def _done(self) -> list[Action]:
        self._move(ImportState.DONE)
        return [Done(self._first)]

    def _drained(self) -> list[Action]:
        if self._outstanding:
            return []
        assert self.failure is not None
        holds_lease = self._offered and self.state is not ImportState.RELEASING
        self._move(ImportState.OVER)
        return [AskRelease(), Over(self.failure)] if holds_lease else [Over(self.failure)]

    def _refuse(self, refusal: Refusal) -> list[Action]:
        self.refused[refusal] += 1
        return []

    def _move(self, to: ImportState) -> None:
        self.state = MOVES.move(self.state, to, f"import {self.id}")
