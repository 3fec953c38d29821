"""What is copied between the device's pages and the host tier, and when. engine/offload/page_copier.py moves the bytes.

    store   a page that enters the prefix cache is copied to the host, so that its eviction loses nothing. Nobody waits
            for that, and the page is not held: it is read only as long as it is in the prefix cache, so a copy is good
            if the page is still there when the copy ends. A page that is evicted before its turn is not stored.
    save    pages of a preempted sequence are copied before they are given back
    fill    copies come back into leading pages of a new prompt, those on disk (disk_moves.py) by the host's

One store at a time; the others are begun at once. The leader of a replica decides for all of its ranks, which have the
same KV: each copies its share of what goes to the host, and all of what comes back.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec

from millrace_serve.engine.cache.kv_cache import KvCache
from millrace_serve.engine.cache.radix import Node
from millrace_serve.engine.offload.disk_moves import DiskMoves
from millrace_serve.engine.offload.host_tier import Copy


class PageMoves(msgspec.Struct, frozen=True, array_like=True):
    """pages[i] to or from the host's slots[i]"""

    to_host: bool
    pages: list[int]
    slots: list[int]


@dataclass(slots=True, eq=False)
class CopyJob:
    """pages[i] to or from the host's slot of copies[i]."""

    to_host: bool
    pages: list[int]
    copies: list[Copy]
    done: Callable[[], None]  # what follows when the bytes are there, on every rank of the replica

    @property
    def moves(self) -> PageMoves:
        return PageMoves(self.to_host, self.pages, [copy.slot for copy in self.copies])


class HostCopies:
    def __init__(self, cache: KvCache) -> None:
        self._cache, self._tier = cache, cache.host
        self.disk = DiskMoves(cache.host)
        self._new: list[CopyJob] = []
        self._under_way: dict[CopyJob, None] = {}
        self._storing = False

    @property
    def total(self) -> int:
        """Pages for which there is room. 0: there is no host tier, and none of this does anything."""
        return self._tier.total

    def counts(self) -> dict[str, object]:
        """The fields of engine.core.Load that are known here."""
        return {"host_pages_total": self.total, "host_pages_used": self._tier.used} if self.total else {}

    def take_jobs(self, most_pages: int) -> list[CopyJob]:
        """Those to start now; `finished` ends each. `most_pages`: of a store."""
        if not self._storing:
            self._store(most_pages)
        jobs, self._new = self._new, []
        return jobs

    def finished(self, job: CopyJob) -> None:
        del self._under_way[job]
        job.done()

    def count(self, blocks: list[bytes]) -> int:
        """The longest leading run of `blocks` that is here, and behind it in the disk tier."""
        here = len(self._tier.find(blocks))
        return here + self.disk.count(blocks[here:])

    def fill(self, pages: list[int], blocks: list[bytes], least: int, then: Callable[[int], None]) -> bool:
        """Copy those of `blocks` that `count` finds into `pages`; `then` gets the length of what came. False: there are
        fewer than `least`, and nothing is copied.
        """
        if (count := self.count(blocks)) < least:
            return False
        copies = self._tier.find(blocks)
        self._tier.pin(*copies)

        def done() -> None:
            self._tier.unpin(*copies)
            then(len(copies))

        job = CopyJob(False, pages, copies, done)

        def loaded(more: list[Copy]) -> None:
            copies.extend(more)
            job.pages = pages[: len(copies)]
            self._new.append(job)

        self._under_way[job] = None
        self.disk.load(blocks[len(copies) : count], loaded)
        return True

    def save(self, pages: list[int], blocks: Iterable[bytes], then: Callable[[], None]) -> bool:
        """Copy those of `pages` that are not here yet, as far as there is room. False: there is nothing to copy."""
        copies: dict[int, Copy] = {}
        for page, block in zip(pages, blocks, strict=True):
            if self._tier.get(block) is None and (copy := self._tier.begin(block)):
                copies[page] = copy

        def done() -> None:
            for copy in reversed(copies.values()):
                self._tier.end(copy, good=True)
            self.disk.keep(copies.values())
            then()

        if copies:
            self._begin(CopyJob(True, list(copies), list(copies.values()), done))
        return bool(copies)

    def check(self) -> None:
        """Raise InvariantError if a slot is lost."""
        self._tier.check([copy for job in self._under_way for copy in job.copies] + self.disk.pinned)

    def _store(self, most_pages: int) -> None:
        offered, cache = self._tier.offered, self._cache
        copies: dict[Node, Copy] = {}
        while offered and len(copies) < most_pages:
            node = offered[0]
            if cache.holds(node) and self._tier.get(node.block) is None:
                copy = self._tier.begin(node.block)
                if copy is None:
                    break
                copies[node] = copy
            offered.popleft()

        def done() -> None:
            self._storing = False
            for node, copy in reversed(copies.items()):
                self._tier.end(copy, good=cache.holds(node))
            self.disk.keep(copies.values())

        if copies:
            self._storing = True
            self._begin(CopyJob(True, [node.page for node in copies], list(copies.values()), done))

    def _begin(self, job: CopyJob) -> None:
        self._new.append(job)
        self._under_way[job] = None
