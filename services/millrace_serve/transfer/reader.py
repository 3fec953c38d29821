"""The loop that reads KV on an importing rank. It owns the KvSink, takes commands from an inbox, reports by a callback.

ReadDone reports a read once, when it is final: only then may its destination pages be freed. ReadStuck reports one that
is not final after `stall_s` (docs/explanation/kv-transfer.md, "A read").

After `StopReader` the reads in flight have CLOSE_TIMEOUT_S to end. Then the sink is closed, which makes the rest
FAILED.
"""

import logging
import time
from collections.abc import Callable
from typing import Protocol

import msgspec
from millrace_common.log import PER_REQUEST
from millrace_common.pace import PatientClock

from millrace_serve.transfer import messages
from millrace_serve.transfer.base import KvSink, MemoryHandle, ReadOp, ReadState, TransferError

log = logging.getLogger(__name__)

BUSY_S = 200e-6
MAX_SLEEP_S = 1e-3
CLOSE_TIMEOUT_S = 5.0


class Inbox(Protocol):
    def receive(self, wait_s: float | None) -> list[messages.ToReader]:
        """All commands that are there; waits for the first one up to `wait_s` (None: without limit)."""


class _InFlight(msgspec.Struct):
    read: messages.ReadPages
    op: ReadOp
    posted_at: float
    stuck: bool = False


class Reader:
    """`report` is called on the thread of `run` and must not block."""

    def __init__(
        self,
        sink: KvSink,
        inbox: Inbox,
        report: Callable[[messages.FromReader], None],
        stall_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sink = sink
        self._inbox = inbox
        self._report = report
        self._stall_s = stall_s
        self._patience = PatientClock(clock)
        self._clock = self._patience.now  # of a pause of this process nearly nothing counts
        self._sources: dict[str, MemoryHandle] = {}  # by agent
        self._in_flight: list[_InFlight] = []
        self._closing_at: float | None = None  # deadline

    def run(self) -> None:
        """Returns after StopReader, with nothing in flight."""
        moved_at = self._clock()
        sleep_s = 0.0
        while self._closing_at is None or (self._in_flight and self._clock() < self._closing_at):
            commands = self._inbox.receive(sleep_s if self._in_flight else None)
            self._patience.tick()
            for command in commands:
                self._do(command)
            if self._poll_all() or commands:
                moved_at, sleep_s = self._clock(), 0.0
            elif (quiet_s := self._clock() - moved_at) >= BUSY_S:
                sleep_s = min(quiet_s / 8, MAX_SLEEP_S)
        for command in self._inbox.receive(0.0):
            self._do(command)
        self._sink.close()
        self._poll_all()

    def _do(self, command: messages.ToReader) -> None:
        match command:
            case messages.AddSource(source):
                self._sources[source.agent] = source
                try:
                    self._sink.connect(source)
                except TransferError as error:  # the reads of this source report it
                    log.warning("cannot connect to an exporter: %s", error, extra=PER_REQUEST)
            case messages.DropSource(agent):
                self._sources.pop(agent, None)
                self._sink.disconnect(agent)
            case messages.ReadPages():
                self._post(command)
            case messages.StopReader():
                self._closing_at = self._clock() + CLOSE_TIMEOUT_S

    def _post(self, read: messages.ReadPages) -> None:
        source = self._sources.get(read.agent)
        if source is None:
            self._finish(read, f"{read.agent} was dropped")
            return
        if self._closing_at is not None:
            self._finish(read, "the reader is closing")
            return
        posted_at = self._clock()
        try:
            self._sink.connect(source)
            op = self._sink.read(source, read.src_pages, read.dst_pages)
        except TransferError as error:
            self._finish(read, str(error))
        else:
            self._in_flight.append(_InFlight(read, op, posted_at))

    def _poll_all(self) -> bool:
        """True: a read became final. It leaves `_in_flight` before it is reported."""
        final: list[_InFlight] = []
        still: list[_InFlight] = []
        for x in self._in_flight:
            (still if x.op.poll() is ReadState.PENDING else final).append(x)
        self._in_flight = still
        for x in final:
            self._finish(x.read, x.op.error, x.op.corrupt)
        for x in still:
            self._report_if_stuck(x)
        return bool(final)

    def _report_if_stuck(self, x: _InFlight) -> None:
        seconds = self._clock() - x.posted_at
        if x.stuck or seconds < self._stall_s:
            return
        x.stuck = True
        log.warning("a read of %d KV pages from %s is stuck: %.1f s", len(x.read.dst_pages), x.read.agent, seconds)
        self._sink.disconnect(x.read.agent)
        self._report(messages.ReadStuck(x.read.id, x.read.read))

    def _finish(self, read: messages.ReadPages, error: str, corrupt: bool = False) -> None:
        self._report(messages.ReadDone(read.id, read.read, error, len(read.dst_pages), corrupt))
