"""The thread of a rank that reads KV: owns the KvSink, takes commands from any thread, reports through one callback.

Life of one read:

1. `read` puts it on the command queue; the thread connects to the peer if needed and posts it.
2. The thread polls it: busily for `busy_s` after anything moved, then with sleeps of an eighth of the time since then,
   up to `max_sleep_s`. A new command ends a sleep at once; with nothing in flight the thread sleeps on the queue.
3. Final: `ReadFinished` is reported, once. Only now may its destination pages be freed.
   Not final after `read_timeout_s`: `ReadStalled` is reported, once, and the peer is disconnected; the next read of it
   connects anew. The pages are in quarantine until ReadFinished, however long that takes.

`close` lets what is in flight end for up to `close_timeout_s` and then closes the sink, which makes the rest FAILED.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Hashable, Sequence

import msgspec

from millrace_serve.transfer.base import KvSink, MemoryHandle, ReadOp, ReadState, TransferError

log = logging.getLogger(__name__)


class ReaderConfig(msgspec.Struct, frozen=True, kw_only=True):
    read_timeout_s: float = 10.0
    busy_s: float = 200e-6
    max_sleep_s: float = 1e-3
    close_timeout_s: float = 5.0


class Connected(msgspec.Struct, frozen=True):
    agent: str
    error: str  # empty: the peer can be read


class ReadFinished(msgspec.Struct, frozen=True):
    key: Hashable
    error: str  # empty: every page arrived
    num_pages: int
    seconds: float  # from the command to the end


class ReadStalled(msgspec.Struct, frozen=True):
    """The read is not over: ReadFinished follows when it is."""

    key: Hashable
    agent: str
    seconds: float


class ReaderDied(msgspec.Struct, frozen=True):
    """The thread ended by an error of ours: no further event will come, and its pages must stay allocated."""

    error: str


ReaderEvent = Connected | ReadFinished | ReadStalled | ReaderDied


class _Connect(msgspec.Struct, frozen=True):
    source: MemoryHandle


class _Read(msgspec.Struct, frozen=True):
    key: Hashable
    source: MemoryHandle
    src_pages: list[int]
    dst_pages: list[int]
    asked_at: float


class _Disconnect(msgspec.Struct, frozen=True):
    agent: str


class _Close(msgspec.Struct, frozen=True):
    pass


_Command = _Connect | _Read | _Disconnect | _Close


class _InFlight(msgspec.Struct):
    read: _Read
    op: ReadOp
    posted_at: float
    stalled: bool = False


class Reader:
    """`on_event` is called on the reader's thread and must not block. No two reads in flight may share a key."""

    def __init__(
        self,
        sink: KvSink,
        config: ReaderConfig,
        on_event: Callable[[ReaderEvent], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._config = config
        self._on_event = on_event
        self._clock = clock
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._in_flight: list[_InFlight] = []
        self._closing_at: float | None = None  # deadline
        self._thread = threading.Thread(target=self._main, name="kv-reader", daemon=True)
        self._thread.start()

    def connect(self, source: MemoryHandle) -> None:
        """Answered by Connected. Reads connect by themselves; this moves the cost to the warm-up."""
        self._commands.put(_Connect(source))

    def read(self, key: Hashable, source: MemoryHandle, src_pages: Sequence[int], dst_pages: Sequence[int]) -> None:
        self._commands.put(_Read(key, source, list(src_pages), list(dst_pages), self._clock()))

    def disconnect(self, agent: str) -> None:
        self._commands.put(_Disconnect(agent))

    def close(self) -> None:
        """Returns when nothing is in flight. Idempotent."""
        if self._thread.is_alive():
            self._commands.put(_Close())
            self._thread.join()

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_quarantined_pages(self) -> int:
        return sum(len(x.read.dst_pages) for x in tuple(self._in_flight) if x.stalled)

    def _main(self) -> None:
        try:
            self._loop()
        except Exception as error:
            log.exception("kv reader died reads_in_flight=%d", len(self._in_flight))
            self._on_event(ReaderDied(f"{type(error).__name__}: {error}"))

    def _loop(self) -> None:
        moved_at = self._clock()
        sleep_s = 0.0
        while self._closing_at is None or (self._in_flight and self._clock() < self._closing_at):
            moved = self._take_commands(sleep_s)
            moved |= self._poll_all()
            if moved:
                moved_at, sleep_s = self._clock(), 0.0
            elif (quiet_s := self._clock() - moved_at) >= self._config.busy_s:
                sleep_s = min(quiet_s / 8, self._config.max_sleep_s)
        while not self._commands.empty():
            self._do(self._commands.get())
        self._sink.close()
        self._poll_all()

    def _take_commands(self, sleep_s: float) -> bool:
        """Waits for the first command up to `sleep_s`, without limit when nothing is in flight."""
        moved = False
        try:
            if not self._in_flight:
                self._do(self._commands.get())
            elif sleep_s:
                self._do(self._commands.get(timeout=sleep_s))
            else:
                self._do(self._commands.get_nowait())
            moved = True
            while True:
                self._do(self._commands.get_nowait())
        except queue.Empty:
            return moved

    def _do(self, command: _Command) -> None:
        match command:
            case _Connect(source):
                self._on_event(Connected(source.agent, self._error_of(lambda: self._sink.connect(source))))
            case _Read():
                self._post(command)
            case _Disconnect(agent):
                self._sink.disconnect(agent)
            case _Close():
                self._closing_at = self._clock() + self._config.close_timeout_s

    def _post(self, read: _Read) -> None:
        if self._closing_at is not None:
            self._finish(read, "the reader is closing")
            return
        posted_at = self._clock()
        try:
            self._sink.connect(read.source)
            op = self._sink.read(read.source, read.src_pages, read.dst_pages)
        except TransferError as error:
            self._finish(read, str(error))
        else:
            self._in_flight.append(_InFlight(read, op, posted_at))

    def _poll_all(self) -> bool:
        """True: something became final. It leaves `_in_flight` before it is reported."""
        final: list[_InFlight] = []
        still: list[_InFlight] = []
        for x in self._in_flight:
            (still if x.op.poll() is ReadState.PENDING else final).append(x)
        self._in_flight = still
        for x in final:
            self._finish(x.read, x.op.error)
        for x in still:
            self._report_if_stalled(x)
        return bool(final)

    def _report_if_stalled(self, x: _InFlight) -> None:
        seconds = self._clock() - x.posted_at
        if x.stalled or seconds < self._config.read_timeout_s:
            return
        x.stalled = True
        agent = x.read.source.agent
        log.warning("kv read stalled agent=%s pages=%d s=%.1f", agent, len(x.read.dst_pages), seconds)
        self._sink.disconnect(agent)
        self._on_event(ReadStalled(x.read.key, agent, seconds))

    def _finish(self, read: _Read, error: str) -> None:
        self._on_event(ReadFinished(read.key, error, len(read.dst_pages), self._clock() - read.asked_at))

    @staticmethod
    def _error_of(call: Callable[[], None]) -> str:
        try:
            call()
        except TransferError as error:
            return str(error)
        return ""
