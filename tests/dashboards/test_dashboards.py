"""Dashboards and alerts as files: they are what the generator writes, complete, and fit to be looked at."""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from millrace_dashboards import alerts, files
from millrace_dashboards.alert import RUNBOOKS, Deployment, Thresholds
from millrace_dashboards.boards import DASHBOARDS
from millrace_dashboards.grafana import COLUMNS, Dashboard
from millrace_dashboards.promql import CATALOGUE, Scope
from millrace_testing.prometheus import binary, needs_prometheus

RULES = [alert for group in alerts.groups().values() for alert in group]
EXPRESSIONS = [
    query.expr for board in DASHBOARDS for row in board.rows for panel in row.panels for query in panel.queries
]


def panels(board: Dashboard) -> list[dict[str, Any]]:
    return board.to_json()["panels"]


def test_the_chart_has_what_the_generator_writes() -> None:
    assert files.differing(files.rendered(), files.OUT) == [], "run `make dashboards`"


def test_write_and_compare(tmp_path: Path) -> None:
    made = files.rendered()
    assert files.differing(made, tmp_path) == sorted(made)
    files.write(made, tmp_path)
    assert files.differing(made, tmp_path) == []
    (tmp_path / "dashboards" / "old.json").write_text("{}")
    (tmp_path / "alerts.yaml").write_text("groups: []")
    assert files.differing(made, tmp_path) == ["alerts.yaml", "dashboards/old.json"]
    files.write(made, tmp_path)
    assert files.differing(made, tmp_path) == []


def test_every_metric_has_a_panel() -> None:
    shown = set(re.findall(r"millrace_\w+", " ".join(EXPRESSIONS)))
    shown = {re.sub(r"_(bucket|count|sum)$", "", name) for name in shown}
    assert {row.name for row in CATALOGUE.values()} == shown


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_panels_fill_the_grid_without_overlap(board: Dashboard) -> None:
    cells: Counter[tuple[int, int]] = Counter()
    for panel in panels(board):
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= COLUMNS
        cells.update((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"]))
    assert max(cells.values()) == 1
    assert len({panel["id"] for panel in panels(board)}) == len(panels(board))


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_panels_say_what_they_show(board: Dashboard) -> None:
    shown = [panel for panel in panels(board) if panel["type"] != "row"]
    assert len({panel["title"] for panel in shown}) == len(shown)
    for panel in shown:
        assert panel["title"][0].isupper() or panel["title"].split()[0] in {"route", "queue", "prefill", "decode"} | {
            "kv_transfer",
            "first_token",
        }
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]
        for target in panel["targets"]:
            assert target["legendFormat"] != "__auto"
            by = re.search(r"^\w+ by \(([\w, ]+)\)", target["expr"])
            labels = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
            assert not by or labels <= set(by[1].split(", ")), "a legend names labels that the result has"


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.name)
def test_variables_are_those_that_queries_use(board: Dashboard) -> None:
    names = {variable["name"] for variable in board.to_json()["templating"]["list"]}
    used = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(panels(board))))
    assert used == names


def test_names_are_unique() -> None:
    assert len({board.to_json()["uid"] for board in DASHBOARDS}) == len(DASHBOARDS)
    assert len({alert.name for alert in RULES}) == len(RULES)


def test_thresholds_reach_the_rules() -> None:
    thresholds = Thresholds(ttft=1.25, patience="7s", window="11s")
    text = files.rendered(thresholds, "https://example.org/guide", Deployment("serving", "m"))["alerts.yaml"]
    assert "> 1.25" in text and "https://example.org/guide/MillraceErrors.md" in text
    assert text.count("for: 7s") == len(RULES)
    assert "[11s]" in text and "[5m]" not in text
    assert 'namespace="serving",model="m"' in text and "__" not in text


def test_an_alert_knows_its_page() -> None:
    for alert in RULES:
        assert alert.to_json()["annotations"]["runbook_url"] == f"{RUNBOOKS}/Millrace{alert.name}.md"


@needs_prometheus
def test_promtool_accepts_the_rules() -> None:
    checked = subprocess.run(
        [binary("promtool"), "check", "rules", "--lint-fatal", files.OUT / "alerts.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda scope: scope.gauge("nothing"), "no metric 'nothing'"),
        (lambda scope: scope.rate("queued"), "is a gauge, not a counter"),
        (lambda scope: scope.gauge("requests"), "is a counter, not a gauge"),
        (lambda scope: scope.beyond(0.3, "gc_pause"), "millrace_gc_pause_seconds has no bound 0.3; it has 0.0001"),
        (lambda scope: scope.rate("requests", kind="x"), "millrace_requests_total has no label kind"),
    ],
)
def test_a_query_that_the_catalogue_does_not_have_is_refused(make: Any, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        make(Scope())


def test_queries() -> None:
    scope = Scope('model="m"', "1m")
    assert scope.rate("requests", status="!ok") == 'rate(millrace_requests_total{model="m",status!="ok"}[1m])'
    assert scope.quantile(0.5, "stage", "pod", stage="~a|b") == (
        'histogram_quantile(0.5, sum by (le, pod) (rate(millrace_stage_seconds_bucket{model="m",stage=~"a|b"}[1m])))'
    )
    assert Scope().gauge("queued") == "millrace_queue_requests"
