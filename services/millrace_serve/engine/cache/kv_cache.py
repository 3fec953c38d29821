"""Pages for sequences: the block pool and the prefix cache behind one interface.

Life of a page:
    1. `allocate`  free -> running (evicting idle cached pages when the free list is short)
    2. `insert`    a full page whose KV is written becomes findable; from now on it is read only
    3. `match`     another sequence of the same prefix shares it
    4. `publish`   a decode worker may read it; `hold` when the prompt is done, `unpublish` when its lease has ended
       `serve_prefix`      another worker may read it while it is cached here; `take_back` when that is over
    5. `release`   its last running holder leaves: cached if it was inserted, else free
"""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from millrace_serve.engine.cache.block_pool import BlockPool, Holder, InvariantError
from millrace_serve.engine.cache.changes import CacheChanges
from millrace_serve.engine.cache.radix import Node, RadixTree
from millrace_serve.engine.offload.host_copies import HostCopies

MINUTE_S = 60.0
KEPT_SHARE = 0.5  # of all pages: so that requests which do not ask for it have a cache, too


@dataclass(slots=True, eq=False)
class CachedPrefix:
    """One sequence's place in the tree: its own pages in it, and the equal pages of others that it pins."""

    tail: Node
    num_pages: int
    salt: bytes
    pins: list[int] = field(default_factory=list)

    def path_up(self) -> Iterator[Node]:
        """From the deepest node to the one below the root."""
        node = self.tail
        while node.parent is not None:
            yield node
            node = node.parent


class KvCache:
    def __init__(
        self, num_pages: int, page_size: int, prefix_cache: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.page_size = page_size
        self._clock = clock
        self.pool = BlockPool(num_pages)
        self.changes = CacheChanges()  # for reports to routers
        self._tree = RadixTree(page_size, self.changes.device, int(KEPT_SHARE * self.pool.total))
        self.host = HostCopies(self.changes.host, self._tree.holds)  # none until the engine opens it
        self._enabled = prefix_cache

    @property
    def available(self) -> int:
        """Pages that `allocate` can hand out now."""
        return self.pool.num_free + self._tree.num_idle

    def match(self, tokens: Sequence[int], max_pages: int, salt: bytes) -> tuple[list[int], CachedPrefix]:
        """Take a share of the longest prefix that prompts of this salt have cached."""
        path = self._tree.match(tokens, max_pages, salt) if self._enabled else []
        pages = [node.page for node in path]
        self._share(pages)
        return pages, CachedPrefix(path[-1] if path else self._tree.root, len(pages), salt)

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, or None (and nothing is evicted) when there are not so many."""
        if count > self.available:
            return None
        if self.pool.num_free < count:
            self._tree.expire(int(self._clock() // MINUTE_S))
        while self.pool.num_free < count:
            self.pool.drop([self._tree.evict()], Holder.CACHE)
        return self.pool.allocate(count)

    def insert(self, prefix: CachedPrefix, tokens: Sequence[int], pages: list[int], blocks: Sequence[bytes]) -> None:
        """Put `pages`, all full, under `tokens`; blocks[i] is the block of page i. Where an equal page is there, it
        stays and is pinned.
        """
        if not self._enabled:
            return
        for index in range(prefix.num_pages, len(pages)):
            page = pages[index]
            prefix.tail = self._tree.extend(prefix.tail, tokens, index, prefix.salt, page=page, block=blocks[index])
            if prefix.tail.page == page:
                self.pool.hold([page], Holder.CACHE)
                self.host.tier.offer(prefix.tail)
            else:
                self._share([prefix.tail.page])
                prefix.pins.append(prefix.tail.page)
        prefix.num_pages = max(prefix.num_pages, len(pages))

    def keep(self, prefix: CachedPrefix, seconds: float) -> None:
        """Evict the pages of a running sequence's place after others for so long, to the next full minute."""
        until = int(-(-(self._clock() + seconds) // MINUTE_S))
        self._tree.keep(reversed(list(prefix.path_up())), prefix.salt, until)

    def release(self, prefix: CachedPrefix, pages: list[int]) -> None:
        """A running sequence leaves its pages and pins."""
        self._leave(prefix, pages, Holder.RUNNING)

    def publish(self, pages: list[int]) -> None:
        """Let a decode worker read these pages of a running prompt from now on."""
        self.pool.hold(pages, Holder.PUBLISHED)

    def hold(self, prefix: CachedPrefix, pages: list[int]) -> None:
        """A running prompt leaves. Its published pages stay, and its pins too: a parent must not go before a child."""
        self.pool.hold(prefix.pins, Holder.PUBLISHED)
        self._leave(prefix, pages, Holder.RUNNING)

    def unpublish(self, prefix: CachedPrefix, pages: list[int]) -> None:
        """End of a held prompt; `pages` are the ones that it published."""
        self._leave(prefix, pages, Holder.PUBLISHED)

    def serve_prefix(self, blocks: Sequence[bytes]) -> list[int]:
        """Hold the cached pages of the longest run of `blocks` for another worker."""
        pages = [node.page for node in self._tree.find(blocks)]
        self._share(pages, Holder.PUBLISHED)
        return pages

    def take_back(self, pages: list[int]) -> None:
        """End of a prefix fetch."""
        self.pool.drop(pages, Holder.PUBLISHED)
        self._set_idle(reversed(pages))

    def flush(self) -> None:
        """Evict every idle page, and forget the copies."""
        self.host.tier.clear()
        for _ in range(self._tree.num_idle):
            self.pool.drop([self._tree.evict()], Holder.CACHE)

    def check(self) -> None:
        self.pool.check()
        if self._tree.num_idle != self.pool.num_cached:
            raise InvariantError(f"{self._tree.num_idle} idle nodes but {self.pool.num_cached} cached pages")

    def _share(self, pages: list[int], holder: Holder = Holder.RUNNING) -> None:
        self.pool.hold(pages, holder)
        for page in pages:
            self._tree.set_busy(page)

    def _leave(self, prefix: CachedPrefix, pages: list[int], holder: Holder) -> None:
        self.pool.drop(pages, holder)
        self.pool.drop(prefix.pins, holder)
        self._set_idle(reversed(pages))
        if prefix.pins:  # pages and pins interleave on the path: bring all of it into order
            self._set_idle(node.page for node in prefix.path_up())
        self.host.tier.touch(node.block for node in prefix.path_up())  # as on the device, the deepest is evicted first

    def _set_idle(self, pages: Iterable[int]) -> None:
        for page in pages:
            if self.pool.state(page) == Holder.CACHE:
                self._tree.set_idle(page)
