"""The queue in front of a scheduler: by priority, then by arrival. A request is skipped only while its kind may not get
pages: a prompt that may not be exported yet, or a long prompt behind others. And what is told of those that wait.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator

from millrace_serve.engine.core import Wait
from millrace_serve.engine.schedule.sequence import Phase, Sequence

LOOK_S = 0.5  # between two looks at what waits: shorter waits are told to nobody


class WaitingQueue:
    def __init__(self) -> None:
        # heaps, by whether their prompts are exported, and by their length
        self._heaps: dict[tuple[bool, int], list[tuple[tuple[int, int], Sequence]]] = {}
        # tokens of each, as they were when it came; heaps keep entries of discarded sequences until they surface
        self._members: dict[Sequence, int] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def push(self, seq: Sequence, length_class: int) -> None:
        heapq.heappush(self._heaps.setdefault((seq.exports, length_class), []), (seq.order, seq))
        self._members[seq] = len(seq.tokens)
        self.num_tokens += len(seq.tokens)

    def head(self, has_turn: Callable[[Sequence, int], bool] = lambda seq, length_class: True) -> Sequence | None:
        """The first one that has its turn, of the first ones of each kind."""
        firsts = []
        for (_, length_class), heap in self._heaps.items():
            while heap and heap[0][1] not in self._members:
                heapq.heappop(heap)
            if heap and has_turn(heap[0][1], length_class):
                firsts.append(heap[0])
        return min(firsts)[1] if firsts else None

    def discard(self, seq: Sequence) -> None:
        self.num_tokens -= self._members.pop(seq, 0)


class Waits:
    """What waits from one look to the next without anything being done for it. `now` is of the scheduler's clock."""

    def __init__(self) -> None:
        self._looked_at = 0.0
        self._seen: dict[Sequence, int] = {}  # at the latest look, and the tokens that were computed of each
        self._told: dict[Sequence, None] = {}

    def look(self, idle: Iterable[Sequence], now: float) -> list[Wait]:
        """The waits that began or ended, if a look is due. `idle`: what has no turn now, or may have none."""
        if now < self._looked_at + LOOK_S:
            return []
        self._looked_at = now
        before, self._seen = self._seen, {seq: seq.num_computed for seq in idle}
        told, self._told = self._told, {seq: None for seq, done in self._seen.items() if before.get(seq) == done}
        ended = [Wait(seq.id, over=True) for seq in told if seq not in self._told and seq.phase is not Phase.DONE]
        return ended + [Wait(seq.id) for seq in self._told if seq not in told]

    def due_s(self, idle: Iterable[Sequence], now: float) -> float | None:
        """Seconds to the next look; None: there is nothing to look at."""
        if not self._told and not any(True for _ in idle):
            return None
        return max(self._looked_at + LOOK_S - now, 0.0)
