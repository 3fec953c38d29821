"""What the ranks of one host share: a counter of each kind and a wake-up pipe per rank, the vectors of all replicas,
and the rings through which leaders send their followers batches.

Made in three steps, and between two of them all ranks of the host wait for each other: every rank makes what is its
own, opens what is the others', and removes the names, so that a killed rank leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from millrace_serve.engine.lockstep.shared_memory import Counter, Segment, WakeupPipe

LINE = 64  # bytes of a cache line
COUNTERS = 4  # of a rank: POSTED … TAKEN
POSTED, PUBLISHED, WRITTEN, TAKEN = range(COUNTERS)
LOST_BYTES = 4 * LINE  # one for the length, then text
FRAMES, FRAME_BYTES = 4, 1 << 18  # of a ring: a follower may be so many frames behind
FRAME_STRIDE = LINE + FRAME_BYTES  # the bytes that are left of the batch, this frame's included, stand before them


class Host:
    def __init__(self, name: Path, rank: int, ranks: Sequence[int], table_bytes: int, rings: Sequence[int]) -> None:
        """Step 1.

        Args:
            name: of the memory; wake-up pipes have it with a suffix.
            ranks: of this host, ascending.
            table_bytes: for a vector of each replica.
            rings: the ranks that need one.
        """
        self.rank, self.ranks, self._name, self._rings = rank, ranks, name, rings
        self._table_bytes, self._table_stride = table_bytes, -(-table_bytes // LINE) * LINE
        self._tables = LOST_BYTES + len(ranks) * COUNTERS * LINE
        self._frames = self._tables + 2 * self._table_stride
        self._nbytes = self._frames + len(rings) * FRAMES * FRAME_STRIDE
        if rank == ranks[0]:
            self._memory = Segment(name, self._nbytes, create=True)
        self.wakeup_pipes = {rank: WakeupPipe(self._wakeup_pipe(rank), owner=True)}

    def open(self) -> None:
        """Step 2."""
        if self.rank != self.ranks[0]:
            self._memory = Segment(self._name, self._nbytes, create=False)
        for rank in self.ranks:
            if rank != self.rank:
                self.wakeup_pipes[rank] = WakeupPipe(self._wakeup_pipe(rank), owner=False)

    def unlink(self) -> None:
        """Step 3."""
        self._wakeup_pipe(self.rank).unlink()
        if self.rank == self.ranks[0]:
            self._name.unlink()

    def close(self) -> None:
        for wakeup_pipe in self.wakeup_pipes.values():
            wakeup_pipe.close()

    def counter(self, rank: int, kind: int) -> Counter:
        return self._memory.counter(LOST_BYTES + (self.ranks.index(rank) * COUNTERS + kind) * LINE)

    def table(self, step: int) -> memoryview:
        """Steps in turn have two: a rank may read one while another writes the next step's."""
        return self._memory.view[self._tables + step % 2 * self._table_stride :][: self._table_bytes]

    def frame(self, leader: int, count: int) -> memoryview:
        """FRAME_STRIDE bytes for the count-th frame of a leader's ring."""
        index = self._rings.index(leader) * FRAMES + count % FRAMES
        return self._memory.view[self._frames + index * FRAME_STRIDE :][:FRAME_STRIDE]

    def lose(self, why: str) -> None:
        """Tell the ranks of this host why they wait in vain; the first one to say so is believed."""
        if not self._lost():
            text = why.encode()[: LOST_BYTES - 1]
            self._memory.view[1 : 1 + len(text)] = text
            self._memory.view[0] = len(text)

    def look(self, missing: Callable[[], Iterable[int]]) -> Callable[[], str]:
        """For Counter.wait: looks whether the ranks that are `missing` live."""

        def look() -> str:
            ended = (f"rank {rank} has ended" for rank in missing() if not self.wakeup_pipes[rank].owner_lives())
            return self._lost() or next(ended, "")

        return look

    def _lost(self) -> str:
        return bytes(self._memory.view[1 : 1 + self._memory.view[0]]).decode(errors="replace")

    def _wakeup_pipe(self, rank: int) -> Path:
        return self._name.with_name(f"{self._name.name}-wakeup_pipe{rank}")
