"""The second tier of the prefix cache: copies of its pages in the host's memory, found by their block.

Only the bookkeeping; host_copies.py decides what is copied, page_copier.py moves the bytes.
Life of a copy:
    1. `begin`   it has a slot, perhaps that of the copy which was used longest ago, and its bytes are on their way
    2. `end`     they are there, and from now on `find` finds them
    3. `pin`     somebody reads it until `unpin`; without readers it may be evicted
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millrace_serve.engine.cache.block_pool import InvariantError
from millrace_serve.engine.cache.changes import BlockChanges
from millrace_serve.engine.cache.radix import Node


@dataclass(slots=True, eq=False)
class Copy:
    block: bytes
    slot: int
    num_pins: int = 1  # its writer; readers later
    is_whole: bool = False


class HostTier:
    """Slots 0 .. total-1. `changes` hears of every block that comes and goes."""

    def __init__(self, total: int, changes: BlockChanges) -> None:
        self.offered: deque[Node] = deque()  # that came into the prefix cache, and nobody has looked at since
        self._changes = changes
        self._copies: dict[bytes, Copy] = {}  # by block
        self._idle: dict[bytes, Copy] = {}  # those without pins, by block; the one used longest ago is the first
        self.open(total)

    def open(self, total: int) -> None:
        """Before the first copy: there are so many slots."""
        self.total = total
        self._free = list(range(total - 1, -1, -1))

    @property
    def used(self) -> int:
        return self.total - len(self._free)

    def get(self, block: bytes) -> Copy | None:
        """The copy that there is, or will be."""
        return self._copies.get(block)

    def begin(self, block: bytes) -> Copy | None:
        """A slot for the copy of a block that is not here; None: all are in use."""
        assert block not in self._copies, f"block {block.hex()} is copied twice"
        if not self._free:
            if not self._idle:
                return None
            self._forget(next(iter(self._idle)))
        copy = self._copies[block] = Copy(block, self._free.pop())
        return copy

    def end(self, copy: Copy, good: bool) -> None:
        """The bytes are there. Not `good`: they may be those of another block."""
        if self._copies.get(copy.block) is copy:
            if good:
                copy.is_whole = True
                self._changes.store(copy.block)
            else:
                self._forget(copy.block)
        self.unpin(copy)

    def find(self, blocks: Iterable[bytes]) -> list[Copy]:
        """The copies of the longest leading run of `blocks`."""
        found = []
        for block in blocks:
            copy = self._copies.get(block)
            if copy is None or not copy.is_whole:
                break
            found.append(copy)
        return found

    def pin(self, *copies: Copy) -> None:
        for copy in copies:
            copy.num_pins += 1
            if self._idle.get(copy.block) is copy:
                del self._idle[copy.block]

    def unpin(self, *copies: Copy) -> None:
        """The last one to do so leaves the most recently used copies, of them the first one."""
        for copy in reversed(copies):
            copy.num_pins -= 1
            if not copy.num_pins and self._copies.get(copy.block) is copy:
                self._idle[copy.block] = copy
            elif not copy.num_pins:
                self._free.append(copy.slot)

    def offer(self, node: Node) -> None:
        """It came into the prefix cache on the device."""
        if self.total:
            self.offered.append(node)

    def touch(self, blocks: Iterable[bytes]) -> None:
        """They were used on the device, the last one most recently."""
        for block in blocks if self.total else ():
            if copy := self._idle.pop(block, None):
                self._idle[block] = copy

    def clear(self) -> None:
        """Forget everything. What is being read or written keeps its slot until that is over."""
        self.offered.clear()
        for block in list(self._copies):
            self._forget(block)

    def check(self, pinned: Sequence[Copy]) -> None:
        """Raises InvariantError unless every slot is free or has one copy; `pinned`: one entry for each pin."""
        held = {id(copy): copy for copy in (*self._copies.values(), *pinned)}
        slots = sorted(self._free + [copy.slot for copy in held.values()])
        pins = sum(copy.num_pins for copy in held.values())
        idle = sum(not copy.num_pins for copy in self._copies.values())
        if slots != list(range(self.total)) or pins != len(pinned) or idle != len(self._idle):
            raise InvariantError(
                f"host tier is not whole: {len(self._free)} slots free, {len(held)} with a copy, total {self.total}; "
                f"{len(self._idle)} idle (counted {idle}), {pins} pins (counted {len(pinned)})"
            )

    def _forget(self, block: bytes) -> None:
        copy = self._copies.pop(block)
        if self._idle.pop(block, None):
            self._free.append(copy.slot)
        if copy.is_whole:
            self._changes.remove(block)
