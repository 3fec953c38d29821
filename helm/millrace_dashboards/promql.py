"""PromQL from catalogued metrics. A metric is named by its attribute in the catalogue; labels by keyword, where a value
that begins with "~" or "!" is a regular expression or an inequality: `rate("requests", status="!ok")`.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace_common.metrics import PROCESS, ROUTER, WORKER, Metric
from prometheus_client import Counter, Gauge, Histogram

CATALOGUE: dict[str, Metric] = {row.attr: row for row in (*ROUTER, *WORKER, *PROCESS)}
TARGET_LABELS = ("namespace", "pod", "component", "model", "release")
_UP = Metric("up", "up", Gauge, "Whether the last scrape of a target succeeded.")


@dataclass(frozen=True, slots=True)
class Scope:
    """Where queries look, and over which time they take rates."""

    matchers: str = ""  # `model="m"`, of every series
    window: str = "5m"

    # ---- vectors

    def gauge(self, attr: str, **labels: str) -> str:
        row = _row(attr, Gauge)
        return self._series(row, "", labels)

    def rate(self, attr: str, **labels: str) -> str:
        """Of a counter, per second."""
        return f"rate({self._series(_row(attr, Counter), '', labels)}[{self.window}])"

    def count(self, attr: str, **labels: str) -> str:
        """Of a counter, since its process started."""
        return self._series(_row(attr, Counter), "", labels)

    def increase(self, attr: str, **labels: str) -> str:
        """Of a counter, in the window."""
        return f"increase({self._series(_row(attr, Counter), '', labels)}[{self.window}])"

    def changes(self, attr: str, **labels: str) -> str:
        """How often a gauge changed in the window."""
        return f"changes({self._series(_row(attr, Gauge), '', labels)}[{self.window}])"

    def lowest(self, attr: str, **labels: str) -> str:
        """Of a gauge, in the window."""
        return f"min_over_time({self._series(_row(attr, Gauge), '', labels)}[{self.window}])"

    def highest(self, attr: str, **labels: str) -> str:
        """Of a gauge, in the window."""
        return f"max_over_time({self._series(_row(attr, Gauge), '', labels)}[{self.window}])"

    def slope(self, attr: str, **labels: str) -> str:
        """Of a gauge, per second."""
        return f"deriv({self._series(_row(attr, Gauge), '', labels)}[{self.window}])"

    def observed(self, attr: str, part: str, **labels: str) -> str:
        """Of a histogram, per second. `part`: "count" of observations, "sum" of what was observed, or "bucket"."""
        assert part in ("count", "sum", "bucket"), part
        return f"rate({self._series(_row(attr, Histogram), f'_{part}', labels)}[{self.window}])"

    def up(self, **labels: str) -> str:
        """1 for each target that answered the last scrape, 0 for others: Prometheus' own."""
        return self._series(_UP, "", labels)

    # ---- what is made of them

    def quantile(self, q: float, attr: str, *by: str, **labels: str) -> str:
        return f"histogram_quantile({q:g}, {total(self.observed(attr, 'bucket', **labels), 'le', *by)})"

    def mean(self, attr: str, *by: str, **labels: str) -> str:
        sums, counts = (total(self.observed(attr, part, **labels), *by) for part in ("sum", "count"))
        return ratio(sums, counts)

    def beyond(self, bound: float, attr: str, *by: str, **labels: str) -> str:
        """Observations of a histogram above one of its bounds, per second."""
        row = _row(attr, Histogram)
        if bound not in row.buckets:
            raise ValueError(f"{row.name} has no bound {bound:g}; it has {', '.join(f'{b:g}' for b in row.buckets)}")
        below = f"rate({self._series(row, '_bucket', {**labels, 'le': f'{bound:g}'})}[{self.window}])"
        return f"{total(self.observed(attr, 'count', **labels), *by)} - {total(below, *by)}"

    def _series(self, row: Metric, suffix: str, labels: dict[str, str]) -> str:
        unknown = labels.keys() - {*row.labels, *TARGET_LABELS, *(("le",) if suffix == "_bucket" else ())}
        if unknown:
            raise ValueError(f"{row.name} has no label {', '.join(sorted(unknown))}")
        matchers = ",".join(filter(None, (self.matchers, *(_matcher(*pair) for pair in labels.items()))))
        return f"{row.name}{suffix}{{{matchers}}}" if matchers else f"{row.name}{suffix}"


def total(vector: str, *by: str) -> str:
    return _aggregate("sum", vector, by)


def largest(vector: str, *by: str) -> str:
    return _aggregate("max", vector, by)


def smallest(vector: str, *by: str) -> str:
    return _aggregate("min", vector, by)


def number(vector: str, *by: str) -> str:
    """Of series."""
    return _aggregate("count", vector, by)


def ratio(part: str, whole: str) -> str:
    return f"{part} / {whole}"


def _aggregate(operator: str, vector: str, by: tuple[str, ...]) -> str:
    return f"{operator} by ({', '.join(by)}) ({vector})" if by else f"{operator}({vector})"


def _row(attr: str, kind: type) -> Metric:
    row = CATALOGUE.get(attr)
    if row is None:
        raise ValueError(f"no metric {attr!r} in the catalogue")
    found = Histogram if row.buckets else row.kind  # there are several kinds of histogram
    if found is not kind:
        raise ValueError(f"{row.name} is a {found.__name__.lower()}, not a {kind.__name__.lower()}")
    return row


def _matcher(label: str, value: str) -> str:
    for sign, operator in (("~", "=~"), ("!", "!=")):
        if value.startswith(sign):
            return f'{label}{operator}"{value[1:]}"'
    return f'{label}="{value}"'
