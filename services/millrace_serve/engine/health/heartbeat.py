"""A rank's sign of life."""

from __future__ import annotations

import msgspec

HEARTBEAT_S = 0.4  # between two heartbeats of a rank


class RankHeartbeat(msgspec.Struct, frozen=True, tag=True):
    """The rank's process runs. The other fields are those of progress.py.

    Attributes:
        starved: part of the last HEARTBEAT_S in which a thread was ready without a CPU, or that the heartbeat came late
    """

    marks: int
    waiting: bool
    launched: int
    limit_s: float
    doing: str
    compiled: dict[str, int] = {}
    starved: float = 0.0
