"""The disk tier of the prefix cache: a thread that moves pages between the host tier's memory and a PageFolder.

The engine waits for looks alone, LOOK_S at most: a network's folder may hang. A slot belongs to a move from `store` or
`load` until `take` has returned the move.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable

import msgspec

from millrace_serve.engine.offload.page_folder import PageFolder
from millrace_serve.transfer.base import TransferError

log = logging.getLogger(__name__)

MAX_STORES = 8  # waiting
LOOK_S = 0.5  # what was found by then counts
CLOSE_S = 2.0  # for the move that goes on
WARN_EVERY_S = 60.0


class Move(msgspec.Struct, frozen=True):
    block: bytes
    slot: int  # of the host tier
    is_load: bool
    ok: bool = False  # of a finished one: the slot has the block's content, or the folder has the block
    refused: bool = False  # of a load: what was there was not what this deployment had stored


class DiskTier:
    def __init__(self, folder: PageFolder) -> None:
        self._folder = folder
        self._asked = threading.Thread()  # the latest that asks the folder for the engine
        self._moves: queue.PriorityQueue[tuple[int, int, Move | None]] = queue.PriorityQueue()
        self._done: queue.SimpleQueue[Move] = queue.SimpleQueue()
        self._order = itertools.count()
        self._warned_at = 0.0
        self._thread = threading.Thread(target=self._run, name="disk-tier", daemon=True)
        self._thread.start()

    def count(self, blocks: list[bytes]) -> int:
        """The longest leading run of `blocks` that the folder has, as far as it tells in time."""
        found: list[bytes] = []
        self._ask(lambda: found.extend(itertools.takewhile(self._folder.has, blocks)))
        return len(found)

    def load(self, block: bytes, slot: int) -> None:
        """Goes before every store that waits."""
        self._moves.put((0, next(self._order), Move(block, slot, is_load=True)))

    def store(self, block: bytes, slot: int) -> bool:
        """False: the folder is behind, and nothing was begun."""
        if self._moves.qsize() >= MAX_STORES:
            return False
        self._moves.put((1, next(self._order), Move(block, slot, is_load=False)))
        return True

    def take(self) -> list[Move]:
        """The moves that have ended since the last call."""
        return [self._done.get() for _ in range(self._done.qsize())]

    def remove(self, blocks: list[bytes]) -> None:
        """Forget blocks whose content is wrong."""
        self._ask(lambda: list(map(self._folder.remove, blocks)))

    def close(self) -> bool:
        """Moves that have not begun are dropped. False: one hangs, and may still write to its slot."""
        self._moves.put((-1, 0, None))
        self._thread.join(CLOSE_S)
        return not self._thread.is_alive()

    def _ask(self, question: Callable[[], object]) -> None:
        """On another thread, for whose end the engine waits a little. Nothing is asked while an answer is owed."""
        if not self._asked.is_alive():
            self._asked = threading.Thread(target=question, name="disk-look", daemon=True)
            self._asked.start()
            self._asked.join(LOOK_S)

    def _run(self) -> None:
        while (move := self._moves.get()[2]) is not None:
            before = self._folder.refused
            ok = self._carry_out(move)
            self._done.put(msgspec.structs.replace(move, ok=ok, refused=self._folder.refused > before))
        self._folder.close()

    def _carry_out(self, move: Move) -> bool:
        try:
            if move.is_load:
                return self._folder.load(move.block, move.slot)
            if not self._folder.has(move.block):  # else another worker was first
                self._folder.store(move.block, move.slot)
            return True
        except Exception as error:  # without this thread prompts would wait for ever
            if time.monotonic() - self._warned_at >= WARN_EVERY_S:
                self._warned_at = time.monotonic()
                foreseen = isinstance(error, TransferError)
                log.warning("the disk cache failed to store or load KV pages: %s", error, exc_info=not foreseen)
            return False
