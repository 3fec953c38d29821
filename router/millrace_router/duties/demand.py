"""What is asked of the workers: the requests of the last seconds, as this router sees them, scaled to all routers by
what the workers report. Pure; a clock is passed in.

Of other routers' requests a router knows only what they make of the workers: their sequences, the tokens that these
hold, and the output tokens. So the leader's own requests are taken for a sample, and there are as many more as the
workers have more sequences than the leader's. A leader without requests reads their shape from the reports as well.
"""

import enum
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from millrace_common.split import Slo, Workload

from millrace_router.window import SLOTS, Window

WINDOW_S = 10.0
RECENT = 3  # slots of it, which count alone where they differ from those before them
CHANCE = 4.0  # standard deviations, by which the two may differ
MOST_GROWTH = 1.5  # that is expected of a rate until a change of duties has its effect
LEAST = 8  # requests: fewer are no sample


class Count(enum.IntEnum):
    ARRIVALS = 0
    INPUTS = enum.auto()  # tokens
    OUTPUTS = enum.auto()  # tokens that they are expected to get
    PLACED = enum.auto()
    CACHED = enum.auto()  # tokens of the placed ones
    TTFT = enum.auto()  # requests with such a limit
    TTFT_S = enum.auto()  # its sum
    TPOT = enum.auto()
    TPOT_S = enum.auto()
    MET = enum.auto()  # requests that ended within their limits
    OWN = enum.auto()  # sequences of this router, at each look
    ALL = enum.auto()  # of all routers
    HELD = enum.auto()  # tokens whose KV these hold
    GENERATED = enum.auto()  # output tokens of all workers


@dataclass(frozen=True, slots=True)
class Report:
    """Of one flexible worker."""

    own: int  # attempts of this router
    sequences: int
    held: int  # tokens whose KV its sequences hold
    generated: float  # output tokens since its process started


class RecentDemand:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._window = Window(WINDOW_S, len(Count))
        self._generated: Mapping[str, float] = {}  # by epoch, at the latest look
        self._routers = 1
        self.expected_output = 0  # tokens of an output, where max_tokens allows as many; 0: unknown

    def arrived(self, tokens: int, outputs: int, slo: Slo, least: int = 0) -> None:
        """A request of so many prompt tokens, and of `least` to `outputs` output tokens."""
        expected = max(min(outputs, self.expected_output), least) if self.expected_output else outputs
        self._add({Count.ARRIVALS: 1, Count.INPUTS: tokens, Count.OUTPUTS: expected})
        if slo.ttft_s < math.inf:
            self._add({Count.TTFT: 1, Count.TTFT_S: slo.ttft_s})
        if slo.tpot_s < math.inf:
            self._add({Count.TPOT: 1, Count.TPOT_S: slo.tpot_s})

    def placed(self, cached: int) -> None:
        self._add({Count.PLACED: 1, Count.CACHED: cached})

    def ended(self, ttft_s: float, tpot_s: float, slo: Slo) -> None:
        """A request that has its whole answer."""
        if ttft_s <= slo.ttft_s and tpot_s <= slo.tpot_s:
            self._add({Count.MET: 1})

    def look(self, reports: Mapping[str, Report], expected_output: int, routers: int = 1) -> None:
        """What the workers report now, by epoch. To be called every second. `routers`: that the workers list."""
        before, self._generated = self._generated, {epoch: report.generated for epoch, report in reports.items()}
        self.expected_output, self._routers = expected_output, routers
        self._add(
            {
                Count.OWN: math.fsum(report.own for report in reports.values()),
                Count.ALL: math.fsum(report.sequences for report in reports.values()),
                Count.HELD: math.fsum(report.held for report in reports.values()),
                Count.GENERATED: math.fsum(
                    max(report.generated - before.get(epoch, report.generated), 0) for epoch, report in reports.items()
                ),
            }
        )

    def workload(self) -> Workload | None:
        """Of all routers. None: there is nothing to speak of."""
        sums, seconds = self._counted()
        arrivals = sums[Count.ARRIVALS]
        if arrivals < LEAST:
            return self._reported(sums, seconds)
        scaled = self._routers > 1 and sums[Count.OWN] > 0
        others = max(sums[Count.ALL] / sums[Count.OWN], 1.0) if scaled else 1.0
        return Workload(
            input_tokens=sums[Count.INPUTS] / arrivals,
            output_tokens=max(sums[Count.OUTPUTS] / arrivals, 1.0),
            rate=arrivals / seconds * others,
            cached_tokens=sums[Count.CACHED] / sums[Count.PLACED] if sums[Count.PLACED] else 0.0,
        )

    def slo(self, usual: Slo) -> Slo:
        """The mean limits of the requests that have any; `usual`: where none came."""
        sums, _ = self._counted()
        if not sums[Count.ARRIVALS]:
            return usual
        return Slo(
            sums[Count.TTFT_S] / sums[Count.TTFT] if sums[Count.TTFT] else math.inf,
            sums[Count.TPOT_S] / sums[Count.TPOT] if sums[Count.TPOT] else math.inf,
        )

    @property
    def sample(self) -> float:
        """Requests that are counted: their rate is known to one part in the square root of it."""
        return self._counted()[0][Count.ARRIVALS]

    @property
    def growth(self) -> float:
        """Factor by which a rate that has grown within the window may grow on."""
        sums, seconds = self._counted()
        mean = self._window.sums(self._clock())[Count.ARRIVALS] / self._seconds(SLOTS)
        return min(max(sums[Count.ARRIVALS] / seconds / mean, 1.0), MOST_GROWTH) if mean else 1.0

    @property
    def goodput(self) -> float:
        """Requests of this router per second that ended within their limits."""
        return self._window.sums(self._clock())[Count.MET] / self._seconds(SLOTS)

    def _reported(self, sums: list[float], seconds: float) -> Workload | None:
        outputs = self.expected_output
        rate = sums[Count.GENERATED] / seconds / outputs if outputs else 0.0
        if rate * seconds < LEAST or not sums[Count.ALL]:
            return None
        return Workload(max(sums[Count.HELD] / sums[Count.ALL] - outputs / 2, 1.0), outputs, rate)

    def _counted(self) -> tuple[list[float], float]:
        """The sums and the seconds of the window, or of its latest part where the load has changed since."""
        now, seconds, recently = self._clock(), self._seconds(SLOTS), self._seconds(RECENT)
        sums, recent = self._window.sums(now), self._window.sums(now, RECENT)
        if recent[Count.ARRIVALS] < LEAST or recently >= seconds:
            return sums, seconds
        part = recently / (seconds - recently)
        arrivals, inputs = (part * (sums[count] - recent[count]) for count in (Count.ARRIVALS, Count.INPUTS))
        chance = CHANCE * math.sqrt((1 + part) / max(arrivals, 1.0))
        shape = ((recent[Count.ARRIVALS], arrivals), (recent[Count.INPUTS], inputs))
        changed = any(abs(found - expected) > chance * expected for found, expected in shape)
        return (recent, recently) if changed else (sums, seconds)

    def _seconds(self, slots: int) -> float:
        """That so many slots cover: the last one is not over yet."""
        now, slot_s = self._clock(), WINDOW_S / SLOTS
        return max(min(now - self._began, (slots - 1) * slot_s + now % slot_s), slot_s)

    def _add(self, amounts: Mapping[Count, float]) -> None:
        now = self._clock()
        for counter, amount in amounts.items():
            self._window.add(counter, amount, now)
