"""The catalogue of metrics: naming rules, and that a component gets what it lists."""

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.metrics import PROCESS, RENAMED, ROUTER, WORKER, Metric, Metrics, QuickHistogram
from millrace_serve.engine.core import Load
from millrace_serve.worker.frontend.load import BY_POSITION
from millrace_testing.paths import ROOT
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

ALL = (*ROUTER, *WORKER, *PROCESS)


@pytest.mark.parametrize("row", ALL, ids=lambda row: row.attr)
def test_name_follows_the_rules(row: Metric) -> None:
    assert re.fullmatch(r"millrace_[a-z_]+", row.name)
    assert row.name.endswith("_total") == (row.kind is Counter)
    if row.kind in (Histogram, QuickHistogram):
        assert row.name.endswith(("_seconds", "_bytes", "_tokens")), "a histogram names its base unit"
        assert row.buckets == tuple(sorted(row.buckets))
    assert not re.search(r"_(ms|millis|us|kb|mb|percent)(_|$)", row.name), "base units only"
    assert row.help[0].isupper() or row.help[0].isdigit() or row.help.startswith("KV")
    assert row.help.endswith(".")


@pytest.mark.parametrize(
    ("attr", "longest_s"),
    [
        ("stage", 7200),
        ("itl", 60),
        ("kv_transfer", 60),
        ("kv_read", 60),
        ("prefix_fetch", 60),
        ("gc_pause", 10),
        ("loop_lag", 10),
    ],
)
def test_a_histogram_reaches_what_it_measures(attr: str, longest_s: float) -> None:
    """Prometheus reports a quantile above the last bucket as that bucket."""
    [row] = [row for row in ALL if row.attr == attr]
    assert row.buckets[-1] >= longest_s
    assert all(after <= 3 * before for before, after in pairwise(row.buckets)), "finer than a factor of 3"


def test_names_and_attributes_are_unique() -> None:
    assert len({row.name for row in ALL}) == len(ALL)
    assert len({row.attr for row in ALL}) == len(ALL)


def test_no_label_is_unbounded() -> None:
    for row in ALL:
        assert not set(row.labels) & {"request_id", "room", "model", "user", "prompt", "address", "epoch"}, row.name


@pytest.mark.parametrize("rows", [ROUTER, WORKER, PROCESS, ALL], ids=["router", "worker", "process", "all"])
def test_a_component_registers_all_its_metrics(rows: tuple[Metric, ...]) -> None:
    registry = CollectorRegistry()
    built = Metrics(rows, registry)
    for row in rows:
        assert isinstance(getattr(built, row.attr), row.kind)
    text = generate_latest(registry).decode()
    for row in rows:
        assert f"# HELP {row.name}" in text


def test_renamed_metrics_keep_their_old_names_for_one_release() -> None:
    registry = CollectorRegistry()
    built = Metrics(ALL, registry)
    built.prefix_fetch_pages.labels(direction="served").inc(3)
    built.placements.labels(route="pair", prefill_policy="a", decode_policy="b").inc()
    built.prefix_fetch.observe(0.1)
    policies = {"prefill_policy": "a", "decode_policy": "b"}
    assert registry.get_sample_value("millrace_loan_pages_total", {"direction": "lent"}) == 3
    assert registry.get_sample_value("millrace_decisions_total", {"way": "pair", **policies}) == 1
    assert registry.get_sample_value("millrace_loan_seconds_count") == 1
    text = generate_latest(registry).decode()
    assert [old for old in RENAMED.values() if f"# HELP {old}" not in text] == []


@given(st.lists(st.floats(0, 2)))
def test_a_quick_histogram_says_what_the_usual_one_says(values: list[float]) -> None:
    texts = []
    for kind in (Histogram, QuickHistogram):
        registry = CollectorRegistry()
        histogram = kind("millrace_x_seconds", "X.", (), registry=registry, buckets=(0.5, 1.0))
        for value in values:
            histogram.observe(value)
        lines = generate_latest(registry).decode().splitlines()
        texts.append([line for line in lines if "_created" not in line])
    assert texts[0] == texts[1]


# ------------------------------------------------------------------------------------- the catalogue and the code


FOLDERS = ("proto", "services", "router", "bench")
NOT_METRICS = {"registry"}  # the other attribute of a Metrics


def trees(word: str) -> Iterator[ast.Module]:
    """Of the modules with the word."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("millrace_*/**/*.py")):
            if "_pb2" not in path.name and word in (text := path.read_text()):
                yield ast.parse(text)


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


def counted(tree: ast.Module) -> Iterator[str]:
    """Metrics that counters of an engine name before a slash."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "/" in node.value:
            yield node.value.partition("/")[0]


def test_every_metric_is_in_the_catalogue_and_used() -> None:
    found = {name for tree in trees("metrics") for name in used(tree)} - NOT_METRICS
    by_name = {name for tree in trees("/") for name in counted(tree)} & {row.attr for row in WORKER}
    by_name |= {name for name in BY_POSITION if isinstance(getattr(Load(), name), Sequence)}
    assert found | by_name | {"engine"} == {row.attr for row in ALL}  # "engine" has the other counters


def makes_metrics(tree: ast.Module) -> bool:
    """Whether a class of metrics is imported and stands anywhere but in annotations."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    classes = {alias.name for node in imports if node.module == "prometheus_client" for alias in node.names}
    classes &= {"Counter", "Gauge", "Histogram", "Summary", "Info", "Enum"}
    hints = [getattr(node, name, None) for node in ast.walk(tree) for name in ("annotation", "returns")]
    hinted = {id(node) for hint in hints if hint is not None for node in ast.walk(hint)}
    return any(isinstance(n, ast.Name) and n.id in classes and id(n) not in hinted for n in ast.walk(tree))


def test_nobody_makes_a_metric_beside_the_catalogue() -> None:
    assert sum(makes_metrics(tree) for tree in trees("prometheus_client")) == 1, "millrace_common/metrics.py only"


def test_known_values_fit_the_labels() -> None:
    for row in ALL:
        assert all(len(values) == len(row.labels) for values in row.known), row.name
