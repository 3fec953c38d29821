"""Reads of KV pages that fail in a row. A transport can break for good while its process lives, and a new process has
a new one: so the worker ends with an error, and its supervisor starts it again.
"""

from collections.abc import Callable

LIMIT = 4  # where two or more peers took part
READER_ALONE, SOURCE_ALONE = 2 * LIMIT, 3 * LIMIT  # of a pair of which one is broken the reader ends first


class FailedReads:
    """The reads of one direction. Failures that overlap may have one cause, and count as one."""

    def __init__(self, what: str, limit_alone: int, leave: Callable[[str], None]) -> None:
        """`limit_alone`: with a single peer, which may be the broken one. `leave(why)` ends the worker."""
        self.total = 0
        self._what = what
        self._limit_alone = limit_alone
        self._leave = leave
        self._in_a_row = 0
        self._peers: set[str] = set()  # that took part in them

    def succeeded(self) -> None:
        self._in_a_row = 0
        self._peers.clear()

    def failed(self, peer: str, total_before: int, error: str) -> None:
        """`total_before`: the value of `total` when the attempt began."""
        self._peers.add(peer)
        if total_before != self.total:
            return
        self.total += 1
        self._in_a_row += 1
        if self._in_a_row >= (LIMIT if len(self._peers) > 1 else self._limit_alone):
            self._leave(f"{self._what} failed {self._in_a_row} times in a row, at last with: {error}")
