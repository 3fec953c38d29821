"""PromQL of rules and dashboards: `scoped` gives every series its matchers, and refuses what the catalogue of metrics
(millrace_common/metrics.py) does not have.
"""

import re
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from millrace_common.metrics import KV_FAULTS, PROCESS, ROUTER, WORKER, Metric
from millrace_rpc.errors import TABLE
from prometheus_client import Counter, Gauge

CATALOGUE: dict[str, Metric] = {row.attr: row for row in (*ROUTER, *WORKER, *PROCESS)}
TARGET_LABELS = ("namespace", "pod", "component", "model", "release")
WHERE = ("namespace", "model", "release")  # labels that name a deployment
WORDS = {  # what `$word` stands for in the YAML files
    "where": ", ".join(WHERE),
    "server_faults": "|".join(sorted(reason.lower() for reason, row in TABLE.items() if row.http >= 500)),
    "kv_faults": "|".join(KV_FAULTS),
    "deployment": "{{ $labels.model }}, release {{ $labels.release }} in {{ $labels.namespace }}",
    "named_gpu": "GPU {{ $labels.gpu }} of {{ $labels.Hostname }}",
}
_UP = Metric("up", "up", Gauge, "Whether the last scrape of a target succeeded: Prometheus' own.")
_METRICS = {row.name: row for row in (*CATALOGUE.values(), _UP)}
_SERIES = re.compile(r"(?P<call>\w*)\((?P<name>millrace_\w+|up\b)(?:{(?P<labels>[^}]*)})?")
_OF_COUNTERS = ("rate", "increase")
_OF_GAUGES = ("changes", "deriv", "max_over_time", "min_over_time")


@cache
def read(path: Path) -> Any:
    """A file of queries. The result is cached: callers must not change it."""
    return yaml.safe_load(path.read_text())


def filled(text: str, **words: str) -> str:
    """`$word` replaced where the word is known; Prometheus and Grafana have others."""
    known = {**WORDS, **words}
    return re.sub(r"\$(\w+)", lambda found: known.get(found[1], found[0]), text)


def scoped(expr: str, matchers: str) -> str:
    """Raises ValueError for a metric, a label, a bound of a histogram or a use that the catalogue does not have."""

    def series(found: re.Match[str]) -> str:
        call, name, labels = found["call"], found["name"], found["labels"] or ""
        _check(call, name, dict(re.findall(r'(\w+)[=!~]+"([^"]*)"', labels)))
        inner = ",".join(filter(None, (matchers, labels)))
        return f"{call}({name}{{{inner}}}" if inner else f"{call}({name}"

    return _SERIES.sub(series, expr)


def _check(call: str, name: str, labels: dict[str, str]) -> None:
    base, suffix = re.fullmatch(r"(\w+?)(_bucket|_count|_sum)?", name).groups()  # type: ignore[union-attr]  # fits all
    row = _METRICS.get(name) or _METRICS.get(base)
    if row is None or bool(row.buckets) is (row.name == name):
        raise ValueError(f"no metric {name} in the catalogue")
    kind = Counter if row.buckets else row.kind
    wanted = Counter if call in _OF_COUNTERS else Gauge if call in _OF_GAUGES else kind
    if kind is not wanted:
        raise ValueError(f"{call}({name}): it is a {kind.__name__.lower()}, not a {wanted.__name__.lower()}")
    unknown = labels.keys() - {*row.labels, *TARGET_LABELS, *(("le",) if suffix == "_bucket" else ())}
    if unknown:
        raise ValueError(f"{name} has no label {', '.join(sorted(unknown))}")
    if "le" in labels and float(labels["le"]) not in row.buckets:
        raise ValueError(f"{name} has no bound {labels['le']}; it has {', '.join(f'{b:g}' for b in row.buckets)}")
