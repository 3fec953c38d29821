"""The queue in front of a scheduler: by priority, then by arrival. A request is skipped while its kind may not get
pages: a prompt that may not be exported yet, or a long prompt behind others. And what is told of those that wait.

A prompt that will miss its TTFT limit waits for those of its priority that can be in time. But PASSES of these in a row
are the most: then the late one that came first is next. So a late prompt waits for at most (k + 1) x PASSES + k others
of its priority, where k came earlier and wait too. The bound does not count while its kind may get no pages.
"""

import heapq
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from millrace_serve.engine.core import Wait
from millrace_serve.engine.schedule.sequence import Phase, Sequence

PASSES = 8
LOOK_S = 0.5  # between two looks at what waits: shorter waits are told to nobody


class WaitingQueue:
    def __init__(self) -> None:
        # of those that are not late and of those that are, by whether their prompts are exported, and by their length
        self._heaps: dict[tuple[bool, int], tuple[list[Sequence], list[Sequence]]] = {}
        # tokens of each, as they were when it came; heaps keep entries of discarded sequences until they surface
        self._members: dict[Sequence, int] = {}
        self.num_tokens = 0
        self._passes = Counter[int]()  # of each priority, since its latest late one

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def push(self, seq: Sequence, length_class: int, takes_s: float) -> None:
        """`takes_s`: from its beginning to its first token. It may be less, as a cache or another worker may have some
        of its pages. So it is not late before half of its limit. Once preempted it never is.
        """
        limit_s = math.inf if seq.preempted else seq.request.ttft_limit_s or math.inf
        seq.late, seq.late_at = False, seq.arrived + limit_s - min(takes_s, limit_s / 2)
        heapq.heappush(self._heaps.setdefault((seq.exports, length_class), ([], []))[0], seq)
        self._members[seq] = len(seq.tokens)
        self.num_tokens += len(seq.tokens)

    def head(
        self, has_turn: Callable[[Sequence, int], bool] = lambda seq, length_class: True, begins: float = -math.inf
    ) -> Sequence | None:
        """The first one that has its turn, of the first ones of each kind; it may begin at `begins`."""
        firsts = list[Sequence]()
        for (_, length_class), (timely, late) in self._heaps.items():
            while timely and (timely[0] not in self._members or timely[0].late_at < begins):
                if (seq := heapq.heappop(timely)) in self._members:
                    seq.late = True
                    heapq.heappush(late, seq)
            while late and late[0] not in self._members:
                heapq.heappop(late)
            firsts += (seq for seq in (*timely[:1], *late[:1]) if has_turn(seq, length_class))
        return min(firsts, key=self._place, default=None)

    def _place(self, seq: Sequence) -> tuple[int, bool, Sequence]:
        return seq.order[0], seq.late == (self._passes[seq.order[0]] < PASSES), seq

    def admit(self, seq: Sequence) -> None:
        """It gets pages."""
        self._passes[seq.order[0]] = 0 if seq.late else self._passes[seq.order[0]] + 1
        self.discard(seq)

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
