"""What a router did in the last minutes, for its operators: samples of its metrics, and the differences between them.

Prometheus keeps longer and finer histories. This one needs nothing but the router.
"""

import asyncio
import itertools
import logging
import math
from collections import Counter, deque
from collections.abc import Mapping
from typing import NamedTuple

from millrace.v1 import admin_pb2 as pb
from millrace_common.log import survived
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.samples import Sample as Series

from millrace_router.flow.inference import Inference

log = logging.getLogger(__name__)

PERIOD_S = 5.0
SPANS = 60  # of a period each: five minutes
Buckets = Mapping[float, float]  # upper bound, in seconds → observations up to it since the start


TOTALS = {"requests": "status", "retries": "reason", "retries_refused": "", "tokens": "direction"}  # and their label


class Sample(NamedTuple):
    """Totals since the start, and what was there at that time."""

    at: float  # on the event loop's clock
    totals: Mapping[str, Counter[str]]  # of TOTALS, by the value of the label
    ttft: Buckets
    itl: Buckets
    queued: int
    active: int


class Recent:
    def __init__(self, inference: Inference) -> None:
        self._inference = inference
        self._samples: deque[Sample] = deque(maxlen=SPANS + 1)

    async def keep(self) -> None:
        """Take samples until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            with survived(log, "cannot take a sample of the router's metrics"):  # which nobody would take again
                self.take(loop.time())
            await asyncio.sleep(PERIOD_S)

    def take(self, now: float) -> None:
        self._samples.append(sample(self._inference, now))

    def spans(self) -> list[pb.Traffic]:
        """Oldest first."""
        return [between(*pair) for pair in itertools.pairwise(self._samples)]

    def whole(self) -> pb.Traffic | None:
        """All spans as one. None: there is none yet."""
        return between(self._samples[0], self._samples[-1]) if len(self._samples) > 1 else None


def sample(inference: Inference, now: float) -> Sample:
    metrics, active = inference.backend.metrics, inference.active
    totals = {name: _totals(getattr(metrics, name), label) for name, label in TOTALS.items()}
    flows = (one.generation.flow for stream in active for one in stream.continuations)
    totals["tokens"]["output"] += sum(len(flow.outputs) for flow in flows)  # the metric counts at the end
    return Sample(
        at=now,
        totals=totals,
        ttft=_buckets(metrics.stage, {"stage": "first_token"}),
        itl=_buckets(metrics.itl, {}),
        queued=len(inference.backend.admission),
        active=len(active),
    )


def between(old: Sample, new: Sample) -> pb.Traffic:
    more = {name: new.totals[name] - old.totals[name] for name in TOTALS}
    return pb.Traffic(
        seconds=new.at - old.at,
        requests=more["requests"],
        retries=more["retries"],
        retries_refused=more["retries_refused"][""],
        prompt_tokens=more["tokens"]["prompt"],
        output_tokens=more["tokens"]["output"],
        ttft=_seconds(old.ttft, new.ttft),
        itl=_seconds(old.itl, new.itl),
        queued=new.queued,
        active=new.active,
    )


def quantile(part: float, counts: Buckets) -> float:
    """Within a bucket observations are taken to lie evenly, as Prometheus does; above the last bound, at it. `counts`:
    cumulative, by ascending bound, of one observation at least.
    """
    rank = part * max(counts.values())
    lower, before = 0.0, 0.0
    for bound, count in counts.items():
        if count >= rank and count > before:
            return lower if math.isinf(bound) else lower + (bound - lower) * (rank - before) / (count - before)
        lower, before = bound, count
    return lower


def _seconds(old: Buckets, new: Buckets) -> pb.Seconds | None:
    counts = {bound: count - old.get(bound, 0.0) for bound, count in new.items()}
    if not any(counts.values()):
        return None
    return pb.Seconds(p50=quantile(0.5, counts), p99=quantile(0.99, counts))


def _totals(counter: MetricWrapperBase, label: str) -> Counter[str]:
    """Of a metric's series, by the value of a label; without a label, all under the empty string."""
    found: Counter[str] = Counter()
    for series in _series(counter, "_total"):
        found[series.labels.get(label, "")] += int(series.value)
    return found


def _buckets(histogram: MetricWrapperBase, labels: Mapping[str, str]) -> Buckets:
    series = (one for one in _series(histogram, "_bucket") if labels.items() <= one.labels.items())
    return {float(one.labels["le"]): one.value for one in series}


def _series(metric: MetricWrapperBase, end: str) -> list[Series]:
    return [one for family in metric.collect() for one in family.samples if one.name.endswith(end)]
