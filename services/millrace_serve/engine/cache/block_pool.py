"""The holders of each physical page.

A page has three kinds of holders, and its state is its strongest one. Without holders it is free, on the free list.
Page 0 is the null page: it takes the KV writes of padding rows, is never given to a sequence, and has no state.

free + cached + published + running == total, always.
"""

import enum
from collections.abc import Iterable


class InvariantError(RuntimeError):
    """A programmer's mistake that would lose pages or let one request read another's. The message has the numbers."""


class Holder(enum.IntEnum):
    """The strongest first."""

    RUNNING = 0  # a sequence
    PUBLISHED = 1  # a prompt that a decode worker may be reading
    CACHE = 2  # the prefix cache; a page that it holds alone is "cached" and may be evicted


FREE = 3  # the state of a page without holders; the other states have their holder's number


class BlockPool:
    """Pages 1 .. num_pages-1. `freed` collects pages that became free; the owner that scrubs them clears it."""

    def __init__(self, num_pages: int) -> None:
        self.total = num_pages - 1
        self.freed: list[int] = []
        self._free = list(range(num_pages - 1, 0, -1))
        self._refs = ([0] * num_pages, [0] * num_pages, [0] * num_pages)
        self._counts = [0, 0, 0, self.total]  # pages by state

    @property
    def num_free(self) -> int:
        return self._counts[FREE]

    @property
    def num_cached(self) -> int:
        return self._counts[Holder.CACHE]

    @property
    def num_published(self) -> int:
        return self._counts[Holder.PUBLISHED]

    @property
    def num_running(self) -> int:
        return self._counts[Holder.RUNNING]

    def allocate(self, count: int) -> list[int]:
        """`count` free pages with one running holder each, in ascending order: NIXL reads neighbours as
        one. The caller has checked num_free.
        """
        assert count <= len(self._free), f"allocate({count}) with {len(self._free)} free pages"
        start = len(self._free) - count
        pages = sorted(self._free[start:])
        del self._free[start:]
        running = self._refs[Holder.RUNNING]
        for page in pages:
            running[page] = 1
        self._counts[FREE] -= count
        self._counts[Holder.RUNNING] += count
        return pages

    def hold(self, pages: Iterable[int], holder: Holder) -> None:
        """Add a holder to pages that are not free."""
        for page in pages:
            before = self.state(page)
            if before == FREE or page == 0:
                raise InvariantError(f"page {page} is given to a {holder.name} holder but is {self._describe(page)}")
            self._refs[holder][page] += 1
            self._count(before, self.state(page))

    def drop(self, pages: Iterable[int], holder: Holder) -> None:
        """Take a holder away; pages left without any become free."""
        refs = self._refs[holder]
        for page in pages:
            if refs[page] <= 0:
                raise InvariantError(f"page {page} is dropped by a {holder.name} holder but is {self._describe(page)}")
            before = self.state(page)
            refs[page] -= 1
            after = self.state(page)
            self._count(before, after)
            if after == FREE:
                self._free.append(page)
                self.freed.append(page)

    def state(self, page: int) -> int:
        """The strongest holder, or FREE."""
        running, published, cache = self._refs  # this is called several times for each page of a prompt
        if running[page]:
            return Holder.RUNNING
        if published[page]:
            return Holder.PUBLISHED
        return Holder.CACHE if cache[page] else FREE

    def check(self) -> None:
        """Recount everything. Raises InvariantError with the numbers."""
        counts = [0, 0, 0, 0]
        for page in range(1, self.total + 1):
            counts[self.state(page)] += 1
        names = ("running", "published", "cached", "free")
        numbers = ", ".join(f"{n} {c} (counted {k})" for n, c, k in zip(names, self._counts, counts, strict=True))
        if counts != self._counts or sum(counts) != self.total or self._refs[0][0] or self._refs[1][0]:
            raise InvariantError(f"page pool is not whole: {numbers}, total {self.total}")
        free = set(self._free)
        if len(free) != len(self._free) or len(free) != counts[FREE] or any(self.state(p) != FREE for p in free):
            raise InvariantError(f"free list has {len(self._free)} entries ({len(free)} distinct): {numbers}")

    def _count(self, before: int, after: int) -> None:
        self._counts[before] -= 1
        self._counts[after] += 1

    def _describe(self, page: int) -> str:
        held = ", ".join(f"{h.name} x{self._refs[h][page]}" for h in Holder if self._refs[h][page])
        return f"held by {held}" if held else "free"
