"""Dashboards and alerts as files: they are what the generator writes, complete, and fit to be looked at."""

import json
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from millrace_dashboards import alerts, files
from millrace_dashboards.alert import Alert, Deployment, Thresholds
from millrace_dashboards.boards import dashboards
from millrace_dashboards.grafana import ABOVE_ZERO, CHOSEN, COLUMNS, Dashboard, steps
from millrace_dashboards.promql import CATALOGUE, WHERE, filled, scoped
from millrace_testing.paths import ROOT
from millrace_testing.prometheus import binary, needs_prometheus

RULES = {alert.name: alert for group in alerts.groups().values() for alert in group}
BOARDS = dashboards(alerts.DEFAULTS)
PANELS = [panel for board in BOARDS for row in board.rows for panel in row.panels]
EXPRESSIONS = [query.expr for panel in PANELS for query in panel.queries]
every_board = pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.name)


def made(board: Dashboard) -> dict[str, Any]:
    return board.to_json(RULES, BOARDS)


def panels(board: Dashboard) -> list[dict[str, Any]]:
    return made(board)["panels"]


def metrics(*expressions: str) -> set[str]:
    """Names in the catalogue of what the expressions read."""
    names = re.findall(r"millrace_\w+|DCGM_\w+|\bup\b", " ".join(expressions))
    return {re.sub(r"_(bucket|count|sum)$", "", name) for name in names}


def written(folder: Path) -> dict[str, str]:
    paths = (folder / "alerts.yaml", *(folder / "dashboards").glob("*"))
    return {str(path.relative_to(folder)): path.read_text() for path in paths}


def test_chart_has_what_the_generator_writes() -> None:
    assert written(files.OUT) == files.rendered(), "run `make dashboards`"


def test_what_is_there_is_written_anew(tmp_path: Path) -> None:
    made = files.rendered()
    files.write({"alerts.yaml": "groups: []", "dashboards/old.json": "{}"}, tmp_path)
    files.write(made, tmp_path)
    assert written(tmp_path) == made


def test_every_metric_has_a_panel() -> None:
    own = [
        query.expr
        for board in BOARDS
        if board.name != "alerts"
        for row in board.rows
        for panel in row.panels
        for query in panel.queries
    ]
    assert metrics(*own) == {row.name for row in CATALOGUE.values()}


@every_board
def test_panels_fill_the_grid_without_overlap(board: Dashboard) -> None:
    cells: Counter[tuple[int, int]] = Counter()
    for panel in panels(board):
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= COLUMNS
        cells.update((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"]))
    assert max(cells.values()) == 1
    assert len({panel["id"] for panel in panels(board)}) == len(panels(board))


@every_board
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


@every_board
def test_variables_are_those_that_queries_use(board: Dashboard) -> None:
    names = {variable["name"] for variable in made(board)["templating"]["list"]}
    used = set(re.findall(r"\$(?!__)\{?(\w+)", json.dumps(panels(board))))
    assert used == names
    assert names >= {*WHERE, "datasource"} and ("pod" in names or board.name == "alerts")


@every_board
def test_variable_offers_what_the_ones_before_it_leave(board: Dashboard) -> None:
    _, *variables = made(board)["templating"]["list"]
    for number, variable in enumerate(variables):
        chosen = re.findall(r"\$(\w+)", variable["query"]["query"])
        assert chosen == [earlier["name"] for earlier in variables[:number]]


@every_board
def test_board_leads_to_every_board_and_keeps_the_deployment(board: Dashboard) -> None:
    uids = {other["uid"] for other in map(made, BOARDS)}
    links = made(board)["links"]
    assert {link["url"].removeprefix("/d/").partition("?")[0] for link in links} == uids
    for link in links:
        assert set(re.findall(r"\$\{(\w+):queryparam\}", link["url"])) == {"datasource", *WHERE}


def test_names_are_unique() -> None:
    assert len({made(board)["uid"] for board in BOARDS}) == len(BOARDS)
    assert len(RULES) == sum(len(group) for group in alerts.groups().values())


# ------------------------------------------------------------------------------------------------ whose series


def selections(expression: str) -> list[tuple[str, str]]:
    """Names of series and their matchers. A name without matchers selects everything."""
    return re.findall(r"\b(millrace_\w+|ALERTS|up)\b(?:\{([^}]*)\})?", expression)


@pytest.mark.parametrize("label", WHERE)
def test_every_query_selects_by(label: str) -> None:
    """Two releases of one model may be in one namespace. GPUs are of no deployment."""
    marks = [mark["expr"] for board in BOARDS for mark in made(board)["annotations"]["list"]]
    rules = [*(alert.expr for alert in RULES.values()), *alerts.recordings()["millrace-scaling"].values()]
    found = [pair for expr in (*EXPRESSIONS, *marks, *rules) for pair in selections(expr)]
    assert found
    assert [pair for pair in found if not re.search(rf"(^|,){label}=", pair[1])] == []


@pytest.mark.parametrize("file", ["examples/keda-values.yaml", "docs/how-to/size.md"])
def test_examples_select_by_release(file: str) -> None:
    queries = re.findall(r"sum\((millrace_\w+\{[^}]*\})", (ROOT / file).read_text())
    assert queries and all("release=" in query for query in queries)


# ------------------------------------------------------------------------------------------------ limits and links


def limit(sign: Any, value: float, severity: Any = "warning") -> Alert:
    return Alert("X", "", "", value, severity=severity, sign=sign)


@pytest.mark.parametrize(
    ("rules", "colors"),
    [
        ([limit(">", 5)], {None: "green", 5: "orange"}),
        ([limit(">", 0)], {None: "green", ABOVE_ZERO: "orange"}),
        ([limit(">=", 3, "critical")], {None: "green", 3: "red"}),
        ([limit(">", 0.2, "critical"), limit(">", 0.05)], {None: "green", 0.05: "orange", 0.2: "red"}),
        ([limit("<", 5e9)], {None: "orange", 5e9: "green"}),
        ([limit("<", 5), limit("<", 2, "critical")], {None: "red", 2: "orange", 5: "green"}),
        ([limit("==", 0, "critical")], {None: "red", ABOVE_ZERO: "green"}),
    ],
)
def test_colors_are_those_of_the_limits(rules: list[Alert], colors: dict[float | None, str]) -> None:
    assert {step["value"]: step["color"] for step in steps(rules)} == colors


@every_board
def test_panel_of_an_alert_has_its_limit_and_leads_to_it(board: Dashboard) -> None:
    drawn = {panel.title: panel for row in board.rows for panel in row.panels}
    for panel in (panel for panel in panels(board) if panel["type"] != "row"):
        rules = [RULES[name] for name in drawn[panel["title"]].alerts]
        assert panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps", []) == (
            steps(rules) if rules else []
        )
        assert [link["url"] for link in panel["links"]] == [f"/alerting/list?search={rule.title}" for rule in rules]
        for rule in rules:
            assert panel["fieldConfig"]["defaults"]["unit"] == rule.unit
            assert metrics(*(target["expr"] for target in panel["targets"])) <= metrics(rule.value)


@pytest.mark.parametrize("grafana", ["", "https://grafana.example/sub"])
def test_every_alert_leads_to_the_panel_that_draws_its_value(grafana: str) -> None:
    rendered = files.rendered(grafana=grafana)
    boards = {board["uid"]: board for board in map(made, BOARDS)}
    rules = [rule for group in yaml.safe_load(rendered["alerts.yaml"])["groups"] for rule in group["rules"]]
    links = {rule["alert"]: rule["annotations"]["dashboard_url"] for rule in rules if "alert" in rule}
    assert links.keys() == {alert.title for alert in RULES.values()}
    drawn = {alert.title: alert.value for group in alerts.groups(matchers=CHOSEN).values() for alert in group}
    for title, link in links.items():
        uid, number = re.fullmatch(rf"{grafana}/d/([\w-]+)\?viewPanel=(\d+)(&.*)?", link).group(1, 2)
        [panel] = [panel for panel in boards[uid]["panels"] if panel["id"] == int(number)]
        assert [target["expr"] for target in panel["targets"]] == [drawn[title]]


@pytest.mark.parametrize("alert", RULES.values(), ids=RULES)
def test_alert_knows_the_labels_of_its_value(alert: Alert) -> None:
    """Its link and the legend of its panel are made of them."""
    assert set(re.findall(r" by \((?:le, )?([\w, ]+)\)", alert.value)) >= {", ".join(alert.by)}
    assert set(re.findall(r"\$labels\.(\w+)", alert.summary)) <= set(alert.by)


def test_marks_are_of_starts_weights_and_alerts() -> None:
    for board in BOARDS:
        marks = {mark["name"]: mark for mark in made(board)["annotations"]["list"]}
        assert marks.keys() == {"Start", "New weights", "Alert"}
        assert marks["Start"]["useValueForTime"] and marks["Start"]["expr"].endswith(" * 1000"), "milliseconds"


def test_thresholds_reach_the_rules() -> None:
    thresholds = Thresholds(ttft=1.25, patience="7s", window="11s")
    rendered = files.rendered(thresholds, "https://example.org/guide", Deployment("serving", "m", "r"))
    assert '"value": 1.25' in rendered["dashboards/overview.json"], "one source of the limit"
    text = rendered["alerts.yaml"]
    assert "> 1.25" in text and "https://example.org/guide/MillraceErrors.md" in text
    assert text.count("for: 7s") == len(RULES)
    assert "[11s]" in text and "[5m]" not in text
    assert 'namespace="serving",model="m",release="r"' in text and "__" not in text


def test_alert_knows_its_page() -> None:
    for alert in RULES.values():
        assert alert.to_json("")["annotations"]["runbook_url"] == f"docs/alerts/Millrace{alert.name}.md"


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
    ("expr", "error"),
    [
        ("(millrace_nothing)", "no metric millrace_nothing in the catalogue"),
        ("rate(millrace_queue_requests[1m])", "is a gauge, not a counter"),
        ("deriv(millrace_requests_total[1m])", "is a counter, not a gauge"),
        ("rate(millrace_gc_pause_seconds[1m])", "no metric millrace_gc_pause_seconds in"),
        ('rate(millrace_gc_pause_seconds_bucket{le="0.3"}[1m])', "has no bound 0.3; it has 0.0001"),
        ('rate(millrace_requests_total{kind="x"}[1m])', "millrace_requests_total has no label kind"),
        ('rate(millrace_gc_pause_seconds_sum{le="0.1"}[1m])', "has no label le"),
    ],
)
def test_query_beyond_the_catalogue_is_refused(expr: str, error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        scoped(expr, "")


def test_query_gets_matchers_in_every_series_and_words_filled() -> None:
    expr = filled(
        'sum by ($where) (rate(millrace_requests_total{status!="ok"}[$w])) / (millrace_queue_requests)', w="1m"
    )
    assert scoped(expr, 'model="m"') == (
        'sum by (namespace, model, release) (rate(millrace_requests_total{model="m",status!="ok"}[1m]))'
        ' / (millrace_queue_requests{model="m"})'
    )
    assert scoped("(up)", "") == "(up)" and filled("$value $labels.pod") == "$value $labels.pod"
