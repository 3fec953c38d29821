"""A histogram for events of every token: an observation takes 0.3 µs instead of 2, because it takes no lock. Without
labels, and for one thread.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class QuickHistogram(Collector):
    def __init__(
        self, name: str, help: str, labels: Sequence[str], *, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        assert not labels
        self._name, self._help = name, help
        self._bounds = (*buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        names = map(floatToGoString, self._bounds)
        buckets = list(zip(names, itertools.accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)
