"""The disk tier of the prefix cache: a thread that moves pages between the host tier's memory and a PageFolder.

The engine waits for looks alone, LOOK_S at most: a network's folder may hang. The thread also opens the folder, and
tries again with every move. A slot belongs to a move from `store` or `load` until `take` has returned the move.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

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
    def __init__(self, make: Callable[[], PageFolder], before: "DiskTier | None" = None) -> None:
        """`before`: it was closed, and what it still moves is told by this one's `take`."""
        self.opened: Future[None] = Future()  # has the error of the first try
        self._make = make
        self._folder: PageFolder | None = None
        self._before = None if before is None or before.ended else before
        self._asked = threading.Thread()  # the latest that asks the folder for the engine
        self._moves: queue.PriorityQueue[tuple[int, int, Move | None]] = queue.PriorityQueue()
        self._done: queue.SimpleQueue[Move] = queue.SimpleQueue() if before is None else before._done
        self._order = itertools.count()
        self._warned_at = 0.0
        self._thread = threading.Thread(target=self._run, name="disk-tier", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Nothing is moved any more, also by those before it."""
        return not self._thread.is_alive() and (self._before is None or self._before.ended)

    def count(self, blocks: list[bytes]) -> int:
        """The longest leading run of `blocks` that the folder has, as far as it tells in time."""
        found: list[bytes] = []
        self._ask(lambda folder: found.extend(itertools.takewhile(folder.has, blocks)))
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
        self._ask(lambda folder: list(map(folder.remove, blocks)))

    def close(self) -> bool:
        """Moves that have not begun come to nothing. False: one hangs, and may still write to its slot."""
        self._moves.put((-1, 0, None))
        self._thread.join(CLOSE_S)
        return self.ended

    def _ask(self, question: Callable[[PageFolder], object]) -> None:
        """On another thread, for whose end the engine waits a little. Nothing is asked while an answer is owed."""
        if (folder := self._folder) is not None and not self._asked.is_alive():
            self._asked = threading.Thread(target=question, args=(folder,), name="disk-look", daemon=True)
            self._asked.start()
            self._asked.join(LOOK_S)

    def _run(self) -> None:
        try:
            self._open()
            self.opened.set_result(None)
        except Exception as error:
            self.opened.set_exception(error)
        while (move := self._moves.get()[2]) is not None:
            self._done.put(self._carry_out(move))
        while not self._moves.empty():
            if (move := self._moves.get()[2]) is not None:
                self._done.put(move)
        if self._folder is not None:
            self._folder.close()

    def _open(self) -> PageFolder:
        self._folder = self._folder or self._make()
        return self._folder

    def _carry_out(self, move: Move) -> Move:
        ok, refused = True, 0
        try:
            folder = self._open()
            before = folder.refused
            if move.is_load:
                ok = folder.load(move.block, move.slot)
                refused = folder.refused - before
            elif not folder.has(move.block):  # else another worker was first
                folder.store(move.block, move.slot)
        except Exception as error:  # without this thread prompts would wait for ever
            if time.monotonic() - self._warned_at >= WARN_EVERY_S:
                self._warned_at = time.monotonic()
                foreseen = isinstance(error, TransferError)
                log.warning("the disk cache failed to store or load KV pages: %s", error, exc_info=not foreseen)
            ok = False
        return msgspec.structs.replace(move, ok=ok, refused=refused > 0)
