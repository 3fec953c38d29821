"""The shortest way to each exporter: CUDA IPC to a GPU of this host, else NIXL. One sink in front of both."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from millrace_serve.transfer.base import KvSink, MemoryHandle, ReadOp, TransferError

log = logging.getLogger(__name__)


class NearestSink(KvSink):
    """`sinks` in order of preference; the last one takes the sources that the others refuse."""

    def __init__(self, *sinks: KvSink) -> None:
        self._sinks = sinks
        self._way: dict[str, KvSink] = {}

    def connect(self, source: MemoryHandle) -> None:
        if way := self._way.get(source.agent):
            way.connect(source)
            return
        *preferred, last = self._sinks
        for sink in preferred:
            try:
                sink.connect(source)
            except TransferError as error:
                log.info("%s: %s; using the next transport", type(sink).__name__, error)
            else:
                self._way[source.agent] = sink
                return
        last.connect(source)
        self._way[source.agent] = last

    def read(self, source: MemoryHandle, src_pages: Sequence[int], dst_pages: Sequence[int]) -> ReadOp:
        way = self._way.get(source.agent)
        if way is None:
            raise TransferError(f"{source.agent} is not connected")
        return way.read(source, src_pages, dst_pages)

    def disconnect(self, agent: str) -> None:
        if way := self._way.pop(agent, None):
            way.disconnect(agent)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
