"""docs/how-to and docs/alerts name only what exists, and every alert has a page."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from millrace_dashboards import alerts
from millrace_dashboards.alert import RUNBOOKS
from millrace_dashboards.boards import dashboards
from millrace_dashboards.promql import CATALOGUE
from millrace_testing.paths import ROOT

OF_PROCESSES = {"add-a-policy", "secure", "tune-kernels"}  # name keys and modules of processes, not values and metrics
GUIDES = [path for path in sorted((ROOT / "docs" / "how-to").glob("*.md")) if path.stem not in OF_PROCESSES]
PAGES = sorted((ROOT / RUNBOOKS).glob("Millrace*.md"))
ALERTS = {alert.title: alert for group in alerts.groups().values() for alert in group}
DASHBOARDS = dashboards(alerts.DEFAULTS)
TITLES = {(board.title, panel.title) for board in DASHBOARDS for row in board.rows for panel in row.panels}
BOARDS = "|".join(re.escape(board.title) for board in DASHBOARDS)
METRICS = {row.name for row in CATALOGUE.values()} | {name for rules in alerts.recordings().values() for name in rules}
VALUES = yaml.safe_load((ROOT / "helm" / "millrace" / "values.yaml").read_text())
SECTIONS = ("It fires when", "Users feel", "Look at", "Do", "It is silent when")
INDEX = ROOT / RUNBOOKS / "README.md"
documents = pytest.mark.parametrize("document", [*GUIDES, INDEX, *PAGES], ids=lambda path: path.stem)
pages = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.stem)


def text(document: Path) -> str:
    return re.sub(r"\s+", " ", document.read_text())


def anchors(document: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def panels(document: Path) -> set[tuple[str, str]]:
    """Dashboard and panel, of the text and of diagrams."""
    named = set(re.findall(rf"\*({BOARDS}): ([^*]+)\*", text(document)))
    return named | set(re.findall(rf'\{{"({BOARDS}): ([^"<:]+?)(?:<br>|:|")', text(document)))


def known(path: str, values: Any) -> bool:
    """Whether a dotted path of values exists; NAME is any pool."""
    head, _, rest = path.partition(".")
    if not isinstance(values, dict) or head not in values:
        return False
    if head == "config":
        return True  # of the processes: the schema knows
    return not rest or known(rest, values[head])


@documents
def test_panels_exist(document: Path) -> None:
    assert panels(document) <= TITLES


def test_the_guides_name_panels() -> None:
    assert len(set().union(*map(panels, GUIDES))) > 30


@documents
def test_metrics_exist(document: Path) -> None:
    packages = ("millrace_rpc", "millrace_bench", "millrace_load")
    named = {name for name in re.findall(r"\bmillrace_\w+", text(document)) if not name.startswith(packages)}
    assert named <= METRICS


@documents
def test_alerts_exist(document: Path) -> None:
    assert set(re.findall(r"`(Millrace\w+)`", text(document))) <= ALERTS.keys()


@documents
def test_values_exist(document: Path) -> None:
    named = set(
        re.findall(r"`((?:monitoring|networkPolicy|fabric|router|workers\.NAME|cache|tls)\.[\w.]+)`", text(document))
    )
    pool = {"workers": {"NAME": VALUES["workerDefaults"]}}
    files = {"tls.crt", "tls.key"}  # in Secrets
    assert [path for path in named - files if not known(path, VALUES | pool)] == []


@documents
def test_links_lead_to_sections(document: Path) -> None:
    for path, anchor in re.findall(r"\]\(([^)#\s]*)#([^)]+)\)", text(document)):
        target = (document.parent / path).resolve() if path else document
        assert anchor in anchors(target), f"{target.name} has no section {anchor}"


def test_every_alert_has_a_page_and_no_other() -> None:
    assert {page.stem for page in PAGES} == ALERTS.keys()


def test_index_has_them_all_and_knows_which_are_critical() -> None:
    critical, _, others = INDEX.read_text().partition("| about |")
    listed = set(re.findall(r"\[(Millrace\w+)\]\(\1\.md\)", critical))
    assert listed == {name for name, alert in ALERTS.items() if alert.severity == "critical"}
    assert listed | set(re.findall(r"\[(Millrace\w+)\]\(\1\.md\)", others)) == ALERTS.keys()


@pages
def test_page_has_every_section(page: Path) -> None:
    headings = re.findall(r"^\*\*([^*]+)\*\*", page.read_text(), re.MULTILINE)
    assert tuple(heading.rstrip(":") for heading in headings) == SECTIONS
    assert page.read_text().startswith(f"# {page.stem}\n")


@pages
def test_page_says_how_long_it_must_last(page: Path) -> None:
    """And how much it is: what a page says of its rule is what the rule has."""
    alert = ALERTS[page.stem]
    first = text(page).partition("**Users feel:**")[0]
    assert alert.severity in first
    if alert.patience != "0m":
        number, unit = int(alert.patience[:-1]), {"m": "minute", "h": "hour", "s": "second"}[alert.patience[-1]]
        assert f"{number} {unit}" in first, alert.patience
    limit = re.match(r"[<>=!]+ ([\d.e+]+)", alert.condition)
    assert limit is not None
    value = float(limit[1])
    spoken = {f"{value:g}", f"{value * 100:g} %", f"{value / 1e9:g} GB/s", f"{value / 60:g} minutes"}
    assert value in (0, 1) or any(words in first for words in spoken), spoken


@pages
def test_page_names_something_to_look_at(page: Path) -> None:
    look = text(page).partition("**Look at:**")[2].partition("**Do:**")[0]
    assert re.search(rf"\*({BOARDS}): ", look) or "DCGM" in look or "kubectl" in look
