"""The queue in front of a scheduler: by priority, then by arrival. Nobody is skipped, so nobody starves."""

from __future__ import annotations

import heapq

from millrace_serve.engine.sequence import Sequence


class WaitingQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._members: set[Sequence] = set()  # the heap keeps entries of discarded sequences until they surface
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.order, seq))
        self._members.add(seq)
        self.num_tokens += len(seq.tokens)

    def head(self) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def discard(self, seq: Sequence) -> None:
        if seq in self._members:
            self._members.remove(seq)
            self.num_tokens -= len(seq.tokens)
