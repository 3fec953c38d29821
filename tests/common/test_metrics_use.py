"""The catalogue and the code agree: what is used is defined, and what is defined is used. Read with `ast`."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from millrace_common.metrics import PROCESS, ROUTER, WORKER
from millrace_testing.paths import ROOT

FOLDERS = ("proto", "services", "router", "bench")
ROWS = (*ROUTER, *WORKER, *PROCESS)
NOT_METRICS = {"registry"}  # the other attribute of a Metrics


def trees() -> Iterator[ast.Module]:
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("millrace_*/**/*.py")):
            if "_pb2" not in path.name:
                yield ast.parse(path.read_text())


def is_metrics(node: ast.expr) -> bool:
    """`metrics`, `self._metrics`, `backend.metrics`, …"""
    name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
    return name.lstrip("_") == "metrics"


def used(tree: ast.Module) -> Iterator[str]:
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom | ast.Import)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute) or not is_metrics(node.value):
            continue
        if not (isinstance(node.value, ast.Name) and node.value.id in modules):
            yield node.attr


def test_every_metric_that_is_used_is_in_the_catalogue_and_the_other_way_round() -> None:
    found = {name for tree in trees() for name in used(tree)} - NOT_METRICS
    assert found == {row.attr for row in ROWS}


def test_nobody_makes_a_metric_beside_the_catalogue() -> None:
    kinds = {"Counter", "Gauge", "Histogram", "Summary", "Info", "Enum"}
    makers = [
        node.module
        for tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom)
        and node.module == "prometheus_client"
        and kinds & {alias.name for alias in node.names}
    ]
    assert makers == ["prometheus_client"], "millrace_common/metrics.py only"


def test_known_values_fit_the_labels() -> None:
    for row in ROWS:
        assert all(len(values) == len(row.labels) for values in row.known), row.name
