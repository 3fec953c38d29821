"""One sink for two transports: CUDA IPC to a GPU of this host, NIXL otherwise."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from millrace_serve.transfer.base import KvSink, MemoryHandle, ReadOp, TransferError

log = logging.getLogger(__name__)


class NearestSink(KvSink):
    """Reads through `near` whatever it can, and through `far` the sources that `near` refuses."""

    def __init__(self, near: KvSink, far: KvSink) -> None:
        self._near = near
        self._far = far
        self._way: dict[str, KvSink] = {}

    def connect(self, source: MemoryHandle) -> None:
        way = self._way.get(source.agent, self._near)
        try:
            way.connect(source)
        except TransferError as error:
            if source.agent in self._way:
                raise
            log.info("%s: %s; using the next transport", type(way).__name__, error)
            way = self._far
            way.connect(source)
        self._way[source.agent] = way

    def read(self, source: MemoryHandle, src_pages: Sequence[int], dst_pages: Sequence[int]) -> ReadOp:
        way = self._way.get(source.agent)
        if way is None:
            raise TransferError(f"{source.agent} is not connected")
        return way.read(source, src_pages, dst_pages)

    def disconnect(self, agent: str) -> None:
        if way := self._way.pop(agent, None):
            way.disconnect(agent)

    def close(self) -> None:
        self._near.close()
        self._far.close()
