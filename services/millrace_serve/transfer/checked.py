"""A sink whose reads are DONE only if their pages have the checksums that they carry."""

from collections.abc import Callable, Sequence

from millrace_serve.transfer.base import KvSink, MemoryHandle, ReadOp, ReadState

Check = Callable[[Sequence[int]], list[int]]  # engine/step/page_sums.py: PageSums.wrong


class CheckedRead(ReadOp):
    def __init__(self, op: ReadOp, check: Check, pages: Sequence[int]) -> None:
        self._op, self._check, self._pages = op, check, pages
        self._state = ReadState.PENDING

    def poll(self) -> ReadState:
        if self._state is ReadState.PENDING:
            self._state, self.error = self._op.poll(), self._op.error
            if self._state is ReadState.DONE and (wrong := self._check(self._pages)):
                self._state, self.corrupt = ReadState.FAILED, True
                self.error = f"{len(wrong)} pages changed on the way: {wrong[:8]} here have other checksums"
        return self._state


class CheckedSink(KvSink):
    def __init__(self, sink: KvSink, check: Check) -> None:
        self._sink, self._check = sink, check

    def connect(self, source: MemoryHandle) -> None:
        self._sink.connect(source)

    def read(self, source: MemoryHandle, src_pages: Sequence[int], dst_pages: Sequence[int]) -> ReadOp:
        return CheckedRead(self._sink.read(source, src_pages, dst_pages), self._check, dst_pages)

    def disconnect(self, agent: str) -> None:
        self._sink.disconnect(agent)

    def close(self) -> None:
        self._sink.close()
