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

from millrace_serve.engine.cache.changes import BlockChanges
from millrace_serve.engine.cache.radix import Node
from millrace_serve.engine.offload.disk_moves import DiskMoves
from millrace_serve.engine.offload.host_tier import Copy, HostTier
from millrace_serve.engine.offload.page_copier import CopyJob, PageCopier, PageMoves

STORE_POLL_S = 0.02  # how often to look for the end of stores in the disk tier, for which nobody waits
COPY_POLL_S = 0.001  # likewise for the end of copies between the device and the host tier


class HostCopies:
    def __init__(self, changes: BlockChanges, holds: Callable[[Node], bool]) -> None:
        """`holds`: whether the prefix cache has a node's page, which is read only then."""
        self.tier = HostTier(0, changes)
        self.disk = DiskMoves(self.tier)
        self.copier: PageCopier  # `open` brings it
        self.total = 0  # pages for which there is room; 0: there is no host tier, and none of this does anything
        self._holds = holds
        self._new: list[CopyJob] = []
        self._under_way: dict[CopyJob, None] = {}
        self._storing = False

    def open(self, copier: PageCopier) -> None:
        """Before the first copy."""
        self.copier, self.total = copier, copier.num_slots
        self.tier.open(self.total)

    def close(self) -> None:
        if self.disk.close():  # else a move may still write to the memory
            self.copier.close()

    def counts(self) -> dict[str, object]:
        """The fields of engine.core.Load that are known here, but for counters."""
        return {"host_pages_total": self.total, "host_pages_used": self.tier.used} if self.total else {}

    def start(self, share: Callable[[list[PageMoves]], None]) -> None:
        """Begin what was decided, here and, by `share`, on the other ranks of the replica."""
        if not self._storing:
            self._store()
        jobs, self._new = self._new, []
        if jobs:
            share([job.moves for job in jobs])
        for job in jobs:
            self.copier.start(job)

    def poll(self) -> None:
        """Take note of what has ended."""
        for job in self.copier.poll():
            del self._under_way[job]
            job.done()
        self.disk.poll()

    def wait_s(self) -> float | None:
        """Seconds until `poll` should be called; None: nothing moves, as far as it seems."""
        if self.copier.busy or self.disk.loads:
            return COPY_POLL_S
        return STORE_POLL_S if self.disk.stores else None

    def count(self, blocks: list[bytes]) -> int:
        """The longest leading run of `blocks` that is here, and behind it in the disk tier."""
        here = len(self.tier.find(blocks))
        return here + self.disk.count(blocks[here:])

    def fill(self, pages: list[int], blocks: list[bytes], least: int, then: Callable[[int], None]) -> bool:
        """Copy those of `blocks` that `count` finds into `pages`; `then` gets the length of what came. False: there are
        fewer than `least`, and nothing is copied.
        """
        if (count := self.count(blocks)) < least:
            return False
        copies = self.tier.find(blocks)
        self.tier.pin(*copies)

        def done() -> None:
            self.tier.unpin(*copies)
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
            if self.tier.get(block) is None and (copy := self.tier.begin(block)):
                copies[page] = copy

        def done() -> None:
            for copy in reversed(copies.values()):
                self.tier.end(copy, good=True)
            self.disk.keep(copies.values())
            then()

        if copies:
            self._begin(CopyJob(True, list(copies), list(copies.values()), done))
        return bool(copies)

    def check(self) -> None:
        """Raise InvariantError if a slot is lost."""
        self.tier.check([copy for job in self._under_way for copy in job.copies] + self.disk.pinned)

    def _store(self) -> None:
        offered, copies = self.tier.offered, dict[Node, Copy]()
        while offered and len(copies) < self.copier.most_pages:
            node = offered[0]
            if self._holds(node) and self.tier.get(node.block) is None:
                copy = self.tier.begin(node.block)
                if copy is None:
                    break
                copies[node] = copy
            offered.popleft()

        def done() -> None:
            self._storing = False
            for node, copy in reversed(copies.items()):
                self.tier.end(copy, good=self._holds(node))
            self.disk.keep(copies.values())

        if copies:
            self._storing = True
            self._begin(CopyJob(True, [node.page for node in copies], list(copies.values()), done))

    def _begin(self, job: CopyJob) -> None:
        self._new.append(job)
        self._under_way[job] = None
