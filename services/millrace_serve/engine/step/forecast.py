"""When the next step should be launched: late, so that what arrives while a step runs is in the next step and not in
the one behind it, and early enough that the device does not wait.

A step takes at least as long as the fastest of the latest ones of its kind. Where nothing is known of a kind, the next
step is launched at once.
"""

import math
import time
from collections import deque
from collections.abc import Callable

from millrace_serve.engine.step.batch import HostBatch

RECENT = 4  # steps of a kind that are remembered
FRESH_S = 2.0  # since the last of them: contexts grow, and long ones end
KINDS_PER_OCTAVE = 4  # steps of a kind differ in their work by less than a fifth
SPARE = 1 / 8  # of a step, by which it may end earlier than expected
SPARE_S = 2e-3  # in addition
FORGET = 0.9  # of the slowest launch, with every launch

Kind = tuple[int, int]  # rows of a decode sequence, 0 with prompt chunks; the logarithm of the work


class Forecast:
    """Of one engine, which tells it of every launch and of every end."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._took: dict[Kind, deque[tuple[float, float]]] = {}  # (when it ended, seconds)
        self._launch_s = 0.0  # that a launch may take

    def launched(self, seconds: float) -> None:
        """`seconds` of this thread went into the launch."""
        self._launch_s = max(seconds, FORGET * self._launch_s)

    def finished(self, of: Kind | None, seconds: float | None, late: bool = False) -> None:
        """A step of this kind; `seconds` None: it says nothing of others. `late`: it took less than was expected, and
        by how much only a step behind which the next one is launched at once will tell.
        """
        if of is not None and late:
            self._took.pop(of, None)
        elif of is not None and seconds is not None:
            self._took.setdefault(of, deque(maxlen=RECENT)).append((self._clock(), seconds))

    def launch_delay_s(self, of: Kind | None, started_at: float) -> float:
        """Seconds to hold the next launch back, behind a step of this kind that began at `started_at`, by the clock."""
        if of is None or of not in self._took:
            return 0.0
        now, latest = self._clock(), self._took[of]
        if now - latest[-1][0] >= FRESH_S:
            return 0.0
        seconds = min(took for _, took in latest)  # old ones too: the latest may be the one that took so long
        return max(started_at + seconds * (1 - SPARE) - SPARE_S - self._launch_s - now, 0.0)


def kind(batch: HostBatch) -> Kind | None:
    """None: of the chunks of other replicas nothing is known here."""
    if batch.all_decode:
        return batch.num_queries, _class(max(batch.dp_num_tokens, default=batch.num_tokens))
    return None if batch.dp_num_tokens else (0, _class(batch.weight))


def _class(work: float) -> int:
    return int(KINDS_PER_OCTAVE * math.log2(max(work, 1)))
