"""What moves between the host tier and the disk tier, and when. The store moves the bytes beside the engine.

keep   a copy that has become whole waits for its turn to be stored, and is not if it is evicted before
load   blocks that the store has get slots of the host tier, from which they go on to the device
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from millrace_serve.engine.offload.disk_tier import DiskTier
from millrace_serve.engine.offload.host_tier import Copy, HostTier


class DiskMoves:
    def __init__(self, tier: HostTier) -> None:
        self.store: DiskTier | None = None
        self._counts = dict.fromkeys(("store", "load", "refuse", "failed"), 0)  # pages, ever
        self._tier = tier
        self._new: deque[Copy] = deque()  # not stored yet
        self._storing: dict[int, Copy] = {}  # by slot
        self._loading: dict[int, tuple[Copy, DiskLoad]] = {}  # likewise
        self._loads: set[DiskLoad] = set()

    @property
    def loads(self) -> bool:
        """Whether somebody waits for the store."""
        return bool(self._loads)

    @property
    def stores(self) -> bool:
        return bool(self._storing)

    @property
    def pinned(self) -> list[Copy]:
        """One entry for each pin."""
        return [*self._storing.values(), *(copy for load in self._loads for copy in load.copies)]

    def counters(self) -> dict[str, float]:
        """Of Load: pages stored or found there, loaded, found but not stored so by this deployment, and moves that came
        to nothing.
        """
        return {f"disk_pages/{way}": count for way, count in self._counts.items()} if self.store else {}

    def keep(self, copies: Iterable[Copy]) -> None:
        if self.store:
            self._new.extend(copies)
            self._store_new(self.store)

    def count(self, blocks: Iterable[bytes]) -> int:
        """The longest leading run of `blocks` that the store has and the host tier has not."""
        store = self.store
        if store is None:
            return 0
        return sum(1 for _ in itertools.takewhile(lambda block: block not in self._tier and store.has(block), blocks))

    def load(self, blocks: Iterable[bytes], then: Callable[[list[Copy]], None]) -> None:
        """Load `blocks`, of which `count` said that they are there, as far as the host tier has slots; `then` gets the
        leading run of those that came, in order and pinned, perhaps at once.
        """
        load = DiskLoad(then)
        for block in blocks:
            if self.store is None or block in self._tier or (copy := self._tier.begin(block)) is None:
                break
            self._loading[copy.slot] = copy, load
            self.store.load(copy.block, copy.slot)
            load.copies.append(copy)
        load.left = len(load.copies)
        self._loads.add(load)
        self._go_on(load)

    def remove(self, blocks: Iterable[bytes]) -> None:
        """Forget blocks whose content is wrong."""
        if self.store:
            self.store.remove(blocks)

    def poll(self) -> None:
        """Take note of the moves that have ended."""
        if self.store is None:
            return
        for move in self.store.take():
            self._counts["refuse"] += move.refused
            self._counts["failed"] += not move.ok
            if move.is_load:
                self._loaded(*self._loading.pop(move.slot), move.ok)
            else:
                self._tier.unpin(self._storing.pop(move.slot))
                self._counts["store"] += move.ok
        self._store_new(self.store)

    def _store_new(self, store: DiskTier) -> None:
        while self._new:
            copy = self._new[0]
            if self._tier.find([copy.block]) == [copy]:
                if not store.store(copy.block, copy.slot):
                    return
                self._tier.pin(copy)
                self._storing[copy.slot] = copy
            self._new.popleft()

    def _loaded(self, copy: Copy, load: DiskLoad, ok: bool) -> None:
        self._counts["load"] += ok
        self._tier.pin(copy)  # for the reader
        self._tier.end(copy, good=ok)
        load.left -= 1
        self._go_on(load)

    def _go_on(self, load: DiskLoad) -> None:
        if load.left:
            return
        self._loads.remove(load)
        good = list(itertools.takewhile(lambda copy: copy.is_whole, load.copies))
        for copy in reversed(load.copies[len(good) :]):
            self._tier.unpin(copy)
        load.then(good)


@dataclass(slots=True, eq=False)
class DiskLoad:
    then: Callable[[list[Copy]], None]
    copies: list[Copy] = field(default_factory=list)
    left: int = 0  # of their moves
