"""The third tier of the prefix cache, as the engine sees it; engine/offload/disk_tier.py is one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import msgspec


class Move(msgspec.Struct, frozen=True):
    block: bytes
    slot: int  # of the host tier
    is_load: bool
    ok: bool = False  # of a finished one: the slot has the block's content, or the store has the block
    refused: bool = False  # of a load: what was there was not what this deployment had stored


class PageStore(Protocol):
    """Nothing here waits. A slot belongs to a move from `store` or `load` until `take` has returned the move."""

    def has(self, block: bytes) -> bool: ...

    def load(self, block: bytes, slot: int) -> None:
        """Goes before every store that waits."""

    def store(self, block: bytes, slot: int) -> bool:
        """False: the store is behind, and nothing was begun."""

    def take(self) -> list[Move]:
        """The moves that have ended since the last call."""

    def remove(self, blocks: Iterable[bytes]) -> None:
        """Forget blocks whose content is wrong."""

    def close(self) -> None:
        """Moves that have not begun are dropped."""
