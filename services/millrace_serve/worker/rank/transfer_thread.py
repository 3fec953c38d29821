"""The transfer side of an importing rank: commands of the frontend go to the Reader, its events go back."""

from __future__ import annotations

import threading
from typing import Any

import zmq

from millrace_serve.engine.core import RequestId
from millrace_serve.transfer.base import KvSink, MemoryHandle
from millrace_serve.transfer.reader import (
    Connected,
    Reader,
    ReaderConfig,
    ReaderDied,
    ReaderEvent,
    ReadFinished,
    ReadStalled,
)
from millrace_serve.worker.channels import Receiver, Sender
from millrace_serve.worker.messages import (
    AddSource,
    DropSource,
    FromRank,
    RankFailed,
    ReadDone,
    ReadPages,
    ReadStuck,
    Report,
    SourceAdded,
    Stop,
    ToTransfer,
)

# stands for a source that was dropped while a read of it was on its way here: no transport connects to it
GONE = MemoryHandle(transport="none", agent="(dropped)", metadata=b"", base=0, page_bytes=0, num_pages=0)


class TransferThread:
    """`endpoint` takes the commands. A read is keyed by (request, read) all the way."""

    def __init__(
        self, sink: KvSink, rank: int, context: zmq.Context[Any], bind: str, frontend: str, stall_s: float
    ) -> None:
        self._rank = rank
        self._inbox: Receiver[ToTransfer] = Receiver(context, bind, ToTransfer)
        self._outbox: Sender[FromRank] = Sender(context, frontend)  # the reader's thread uses it, and nobody else
        self._reader = Reader(sink, ReaderConfig(read_timeout_s=stall_s), self._on_event)
        self._sources: dict[str, MemoryHandle] = {}
        self._thread = threading.Thread(target=self._main, name="kv-commands", daemon=True)
        self.endpoint = self._inbox.endpoint

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Until Stop was taken and nothing is in flight."""
        self._thread.join()
        self._inbox.close()
        self._outbox.close()

    def _main(self) -> None:
        while True:
            for command in self._inbox.receive(None):
                if isinstance(command, Stop):
                    self._reader.close()
                    return
                self._do(command)

    def _do(self, command: ToTransfer) -> None:
        match command:
            case AddSource(source):
                self._sources[source.agent] = source
                self._reader.connect(source)
            case DropSource(agent):
                self._sources.pop(agent, None)
                self._reader.disconnect(agent)
            case ReadPages(id, read, agent, src_pages, dst_pages):
                source = self._sources.get(agent) or GONE
                self._reader.read((id, read), source, src_pages, dst_pages)

    def _on_event(self, event: ReaderEvent) -> None:
        self._outbox.send(FromRank(self._rank, _report(event)))


def _report(event: ReaderEvent) -> Report:
    match event:
        case Connected(agent, error):
            return SourceAdded(agent, error)
        case ReadFinished((RequestId() as id, int(read)), error, num_pages):
            return ReadDone(id, read, error, num_pages)
        case ReadStalled((RequestId() as id, int(read))):
            return ReadStuck(id, read)
        case ReaderDied(error):
            return RankFailed(f"the transfer thread died: {error}")
    raise AssertionError(event)
