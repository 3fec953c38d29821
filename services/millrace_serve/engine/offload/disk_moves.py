"""What moves between the host tier and the disk tier, and when. The store moves the bytes beside the engine.

keep   a copy that has become whole waits for its turn to be stored, and is not if it is evicted before
load   blocks that the store has get slots of the host tier, from which they go on to the device. Readers of the same
       block share its move. When no move has ended for LOAD_S, readers go on with the pages that have come, and nobody
       asks for more before one has
"""

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import wait
from dataclasses import dataclass, field

from millrace_serve.engine.offload.disk_tier import DiskTier
from millrace_serve.engine.offload.host_tier import Copy, HostTier
from millrace_serve.engine.offload.limits import GIB, TierLimits
from millrace_serve.engine.offload.page_folder import PageFolder
from millrace_serve.transfer.base import PageBuffer

LOAD_S = 2.0  # a folder that hangs, as a network's may, must not hold up prompts that can be computed, nor a pause
OPEN_S = 2.0  # likewise: other weights are loaded without it


class DiskMoves:
    def __init__(self, tier: HostTier, clock: Callable[[], float] = time.monotonic) -> None:
        self.store: DiskTier | None = None
        self._counts = dict.fromkeys(("store", "load", "refuse", "failed"), 0)  # pages, ever
        self._tier, self._clock = tier, clock
        self._hangs = False
        self._moved_at = 0.0  # when a move ended, or the first store began
        self._new: deque[Copy] = deque()  # not stored yet
        self._storing: dict[int, Copy] = {}  # by slot
        self._loading: dict[int, Copy] = {}  # likewise
        self._loads: list[DiskLoad] = []

    @property
    def loads(self) -> bool:
        """Whether somebody waits for the store."""
        return bool(self._loads)

    @property
    def stores(self) -> bool:
        """Whether stores go on, as far as it seems."""
        return bool(self._storing) and self._clock() < self._moved_at + LOAD_S

    @property
    def pinned(self) -> list[Copy]:
        """One entry for each pin."""
        read = [copy for load in self._loads for copy in load.copies]
        return [*read, *self._loading.values(), *self._storing.values()]

    def counters(self) -> dict[str, float]:
        """Of Load: pages stored or found there, loaded, refused as not of this deployment, and moves without effect."""
        return {f"disk_pages/{way}": count for way, count in self._counts.items()} if self.store else {}

    def open(self, limits: TierLimits, layout: str, memory: PageBuffer, secret: bytes, patient: bool) -> None:
        """From now on the folder of `limits`, if there is one, is the store. `memory`: of the tier's slots. `patient`:
        wait until it is open, and raise TransferError if it cannot be; else its store tries again.
        """
        if (folder := limits.disk_cache) is None:
            return
        self.close()
        self._hangs, most = False, int(limits.disk_cache_gib * GIB)
        self.store = DiskTier(lambda: PageFolder(folder, layout, memory, most, secret), self.store)
        if patient:
            self.store.opened.result()
        else:
            wait([self.store.opened], OPEN_S)

    def close(self) -> bool:
        """False: something may still write to the memory."""
        return self.store is None or self.store.close()

    def keep(self, copies: Iterable[Copy]) -> None:
        if self.store:
            self._new.extend(copies)
            if len(self._new) > 2 * self._tier.total:  # behind one that waits long most are gone
                self._new = deque(copy for copy in self._new if self._tier.find([copy.block]) == [copy])
            self._store_new(self.store)

    def count(self, blocks: Iterable[bytes]) -> int:
        """The longest leading run of `blocks` that the store has and the host tier has not, or not yet."""
        coming = {copy.block for copy in self._loading.values()}
        new = list(itertools.takewhile(lambda block: block in coming or self._tier.get(block) is None, blocks))
        return self.store.count(new) if self.store and new and not self._hangs else 0

    def load(self, blocks: Iterable[bytes], then: Callable[[list[Copy]], None]) -> None:
        """Load `blocks`, of which `count` said that they are there, as far as the host tier has slots; `then` gets the
        leading run of those that came, in order and pinned, perhaps at once.
        """
        load = DiskLoad(then, self._clock())
        for block in blocks:
            copy = self._tier.get(block)
            if copy is None and self.store and (copy := self._tier.begin(block)):
                self._loading[copy.slot] = copy
                self.store.load(block, copy.slot)
            if copy is None or copy.slot not in self._loading:
                break
            self._tier.pin(copy)
            load.copies.append(copy)
        self._loads.append(load)
        if not load.copies:
            self._end(load)

    def remove(self, blocks: list[bytes]) -> None:
        """Forget blocks whose content is wrong."""
        if self.store:
            self.store.remove(blocks)

    def poll(self) -> None:
        """Take note of the moves that have ended."""
        if self.store is None:
            return
        for move in self.store.take():
            self._hangs, self._moved_at = False, self._clock()
            self._counts["refuse"] += move.refused
            self._counts["failed"] += not move.ok
            if move.is_load:
                self._tier.end(self._loading.pop(move.slot), good=move.ok)
            else:
                self._tier.unpin(self._storing.pop(move.slot))
            self._counts["load" if move.is_load else "store"] += move.ok
        for load in list(self._loads):
            comes = any(copy.slot in self._loading for copy in reversed(load.copies))  # the last one comes last, mostly
            if not comes or self._clock() >= max(load.began, self._moved_at) + LOAD_S:
                self._hangs = self._hangs or comes
                self._end(load)
        self._store_new(self.store)

    def _store_new(self, store: DiskTier) -> None:
        while self._new:
            copy = self._new[0]
            if self._tier.find([copy.block]) == [copy]:
                if not store.store(copy.block, copy.slot):
                    return
                self._tier.pin(copy)
                if not self._storing:
                    self._moved_at = self._clock()
                self._storing[copy.slot] = copy
            self._new.popleft()

    def _end(self, load: "DiskLoad") -> None:
        """The reader gets what has come."""
        self._loads.remove(load)
        good = list(itertools.takewhile(lambda copy: copy.is_whole, load.copies))
        self._tier.unpin(*load.copies[len(good) :])
        load.then(good)


@dataclass(slots=True, eq=False)
class DiskLoad:
    then: Callable[[list[Copy]], None]
    began: float
    copies: list[Copy] = field(default_factory=list)
