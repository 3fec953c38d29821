"""docs/operations.md names only what exists: panels, metrics, alerts; and every alert is there."""

from __future__ import annotations

import re

from millrace_dashboards import alerts
from millrace_dashboards.alert import RUNBOOKS
from millrace_dashboards.boards import DASHBOARDS
from millrace_dashboards.promql import CATALOGUE, Scope
from millrace_dashboards.rules import recorded
from millrace_testing.paths import ROOT

TEXT = re.sub(r"\s+", " ", (ROOT / RUNBOOKS).read_text())
TITLES = {(board.title, panel.title) for board in DASHBOARDS for row in board.rows for panel in row.panels}


def test_panels_exist() -> None:
    boards = "|".join(re.escape(board.title) for board in DASHBOARDS)
    named = set(re.findall(rf"\*({boards}): ([^*]+)\*", TEXT))
    assert len(named) > 30
    assert named <= TITLES
    in_diagrams = re.findall(rf'\{{"({boards}): ([^"<:]+?)(?:<br>|:|")', TEXT)
    assert set(in_diagrams) and set(in_diagrams) <= TITLES


def test_metrics_exist() -> None:
    known = {row.name for row in CATALOGUE.values()} | recorded(Scope()).keys()
    named = {name for name in re.findall(r"\bmillrace_\w+", TEXT) if not name.startswith("millrace_rpc")}
    assert named and named <= known


def test_every_alert_is_explained_and_no_other() -> None:
    named = set(re.findall(r"`Millrace(\w+)`", TEXT))
    assert named == {alert.name for group in alerts.groups().values() for alert in group}


def test_links_within_the_guide_exist() -> None:
    headings = re.findall(r"^#+ (.+)$", (ROOT / RUNBOOKS).read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= anchors
