"""The queue in front of a scheduler: by priority, then by arrival. No request is skipped, so none starves."""

from __future__ import annotations

import heapq

from millrace_serve.engine.schedule.sequence import Sequence


class WaitingQueue:
    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        # tokens of each, as they were when it came; the heap keeps entries of discarded sequences until they surface
        self._members: dict[Sequence, int] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.order, seq))
        self._members[seq] = len(seq.tokens)
        self.num_tokens += len(seq.tokens)

    def head(self) -> Sequence | None:
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def discard(self, seq: Sequence) -> None:
        self.num_tokens -= self._members.pop(seq, 0)
