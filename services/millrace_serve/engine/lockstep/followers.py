"""A replica's batches on their way from its leader to its followers."""

from __future__ import annotations

from collections.abc import Sequence

from millrace_serve.engine.lockstep.links import RankConnection
from millrace_serve.engine.lockstep.packing import SIZE


class Outlet:
    """The leader's end."""

    def __init__(self, links: Sequence[RankConnection]) -> None:
        self._links = links

    def send(self, data: bytes | bytearray) -> None:
        """Waits for followers that are too far behind. Raises RankLost."""
        message = SIZE.pack(len(data)) + data
        for link in self._links:
            link.send(message)


class Inlet:
    """A follower's end."""

    def __init__(self, link: RankConnection) -> None:
        self._link = link

    def receive(self) -> bytes:
        """Waits as long as the leader lives. Raises RankLost."""
        (size,) = SIZE.unpack(self._link.receive(SIZE.size))
        return self._link.receive(size)
