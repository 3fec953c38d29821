"""Prompts whose pages other workers read: they are published while later chunks are computed.

Life of an EXPORT request:
    1. Submit            WAITING, in the queue
    2. schedule          RUNNING: a slot, and pages for the whole prompt; cached pages are published at once, if
                         only as a part without pages: the other worker reserves its own while this one computes
    3. commit            after each chunk its finished pages are published
    4. last commit       the first token goes out, with the last part; HELD
    5. LeaseEnded        the pages are free
A request that fetches is EXPECTED until KvOffered says what another worker serves, or KvFailed that nobody does. If
that is more than our prefix cache has, 2 begins a fill (prompts.py), and cached pages are published when it is over:
KvArrived; or KvFailed, and the pages are computed here. KvLate: they may be written for as long as a lost worker likes,
so the request gives them up and returns to the queue; one that has ended gives its slot and its other pages back.
Abort or deadline: nothing published -> DONE, pages free; something published -> HELD until LeaseEnded.
LeaseEnded before 4: no worker will read the rest, so the request ends in an error.
"""

import math
from collections.abc import Iterable

from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import KvChunk, KvReserved, SequenceOutput
from millrace_serve.engine.schedule.outbox import Outbox
from millrace_serve.engine.schedule.pages import Pages
from millrace_serve.engine.schedule.sequence import Sequence


class Publisher:
    """What is published, and how much of the pool that may be."""

    def __init__(self, config: EngineConfig, role: Role, pages: Pages, outbox: Outbox) -> None:
        self._pages, self._outbox = pages, outbox
        # Two workers may wait for each other's reads: half of the pool is for what they read. Only requests that need
        # more than half may wait until a lease ends.
        self._most = config.max_held_pages or (config.usable_pages // 2 if role is Role.FLEXIBLE else None)

    def has_room(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether one more prompt may get pages that are held until its lease ends. `running`: prompts with pages."""
        held = self._pages.cache.pool.num_published + sum(len(other.pages) for other in running if other.exports)
        return not held or self._most is None or held + self._pages.count(len(seq.tokens)) <= self._most

    def needs_all(self, seq: Sequence | None) -> bool:
        """Whether it is a prompt that gets pages only while nothing is held."""
        return seq is not None and seq.exports and self._pages.count(len(seq.tokens)) > (self._most or math.inf)

    def begin(self, seq: Sequence) -> bool:
        """Publish the cached pages of a prompt that has just begun to run, or answer the worker that serves it more.
        Returns whether the served pages are awaited.
        """
        own, from_host = seq.num_computed // self._pages.size, seq.filling
        if seq.num_offered:
            pages = seq.pages[: seq.num_offered]
            num_ours = len(pages) if from_host else min(own, len(pages))
            self._outbox.events.reserved.append(KvReserved(seq.id, pages, num_ours))
        if own < seq.num_offered and not from_host:
            self.publish(seq, 0)
            return True
        seq.num_offered = 0
        self.publish(seq, own)
        return False

    def publish(self, seq: Sequence, num_pages: int, first: SequenceOutput | None = None) -> None:
        """Announce pages[num_published : num_pages]; with `first`, as the last part. There may be no pages in it."""
        span = slice(seq.num_published, num_pages)
        pages, hashes = seq.pages[span], seq.prompt_hashes[span]
        num_tokens = min(num_pages * self._pages.size, len(seq.request.token_ids))
        self._pages.cache.publish(pages)
        part = KvChunk(seq.id, seq.num_published, pages, hashes, num_tokens, first is not None, first)
        self._outbox.events.chunks.append(part)
        seq.num_published = num_pages
