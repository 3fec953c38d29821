"""A replica's batches on their way from its leader to its followers.

Within a host they go through a ring of frames in shared memory, so the leader is not held by a follower that is some
steps behind; a batch that is larger than a frame takes several. To followers on other hosts they go over connections.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace_serve.engine.lockstep.host import FRAME_BYTES, FRAMES, LINE, TAKEN, WRITTEN, Host
from millrace_serve.engine.lockstep.links import RankConnection
from millrace_serve.engine.lockstep.packing import SIZE


class Outlet:
    """The leader's end."""

    def __init__(self, host: Host, followers: Sequence[int], links: Sequence[RankConnection]) -> None:
        """`followers` of this host; `links` to the others."""
        self._host, self._links = host, links
        self._taken = {rank: host.counter(rank, TAKEN) for rank in followers}
        self._look = host.look(self._slow)
        self._written = host.counter(host.rank, WRITTEN)
        self._count = 0

    def send(self, data: bytes | bytearray) -> None:
        """Waits for followers that are too far behind. Raises RankLost."""
        if self._taken:
            for start in range(0, max(len(data), 1), FRAME_BYTES):
                self._write(data, start)
        for link in self._links:
            link.send(SIZE.pack(len(data)) + data)

    def _write(self, data: bytes | bytearray, start: int) -> None:
        for taken in self._taken.values():
            taken.wait(self._count + 1 - FRAMES, self._look)
        frame = self._host.frame(self._host.rank, self._count)
        part = data[start : start + FRAME_BYTES]
        SIZE.pack_into(frame, 0, len(data) - start)
        frame[LINE : LINE + len(part)] = part
        self._count += 1
        self._written.raise_to(self._count)

    def _slow(self) -> list[int]:
        """Followers that still have to read what the next frame would overwrite."""
        return [rank for rank, taken in self._taken.items() if not taken.has(self._count + 1 - FRAMES)]


class Inlet:
    """The end of a follower on the leader's host."""

    def __init__(self, host: Host, leader: int) -> None:
        self._host, self._leader = host, leader
        self._written, self._taken = host.counter(leader, WRITTEN), host.counter(host.rank, TAKEN)
        self._look = host.look(lambda: (leader,))
        self._count = 0

    def receive(self) -> bytearray:
        """Waits as long as the leader lives. Raises RankLost."""
        data, left = bytearray(), FRAME_BYTES + 1
        while left > FRAME_BYTES:
            self._written.wait(self._count + 1, self._look)
            frame = self._host.frame(self._leader, self._count)
            (left,) = SIZE.unpack_from(frame)
            data += frame[LINE : LINE + min(left, FRAME_BYTES)]
            self._count += 1
            self._taken.raise_to(self._count)
        return data


class LinkInlet:
    """The end of a follower on another host."""

    def __init__(self, link: RankConnection) -> None:
        self._link = link

    def receive(self) -> bytearray:
        """Waits as long as the leader lives. Raises RankLost."""
        (size,) = SIZE.unpack(self._link.receive(SIZE.size))
        return self._link.receive(size)
