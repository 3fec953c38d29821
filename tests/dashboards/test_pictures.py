"""The pictures of the guide: what is drawn from a recording, and that there is one of every board."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from millrace_dashboards import alerts
from millrace_dashboards.alert import Alert
from millrace_dashboards.boards import dashboards
from millrace_dashboards.grafana import Dashboard, Panel, Query, Row
from millrace_testing.paths import ROOT
from millrace_testing.pictures.draw import NAMED, Painter, text
from millrace_testing.pictures.record import Recording, queries, record
from millrace_testing.prometheus import needs_prometheus

FIGURES = ROOT / "docs" / "figures"
URLS = [board.url.removeprefix("/d/") for board in dashboards(alerts.DEFAULTS)]
START, STEP, COUNT = 1000.0, 2, 31
RULES = {"Slow": Alert("Slow", "", "v", 5.0, unit="s"), "Bad": Alert("Bad", "", "v", 9.0, severity="critical")}


def series(values: list[float], **labels: str) -> dict[str, Any]:
    return {"metric": labels, "values": [[START + STEP * number, str(value)] for number, value in enumerate(values)]}


def drawn(panel: Panel, answers: dict[str, list[dict[str, Any]]]) -> Figure:
    board = Dashboard("b", "Board", "", (Row("Row", (panel,)),)).to_json(RULES, ())
    nothing: dict[str, list[dict[str, Any]]] = {query: [] for query in queries([board])}
    return Painter(Recording(START, START + STEP * (COUNT - 1), STEP, [board], nothing | answers)).draw(board)


def words(figure: Figure) -> list[str]:
    return [one.get_text() for one in figure.texts]


@pytest.mark.parametrize(
    ("value", "unit", "expected"),
    [
        (0.0123, "s", "12.3 ms"),
        (600.0, "s", "10 min"),
        (0.05, "percentunit", "5 %"),
        (1234.0, "ops", "1.23 k/s"),
        (5e9, "Bps", "5 GB/s"),
        (-24.0, "short", "-24"),
        (300.0, "dateTimeFromNow", "5 min ago"),
        (math.nan, "s", "-"),
    ],
)
def test_values_are_written_with_their_unit(value: float, unit: str, expected: str) -> None:
    assert text(value, unit) == expected


def test_curves_have_limits_and_a_legend() -> None:
    panel = Panel("P", "", "s", (Query("v", "{{pod}}"),), alerts=("Slow", "Bad"))
    figure = drawn(panel, {"v": [series([1.0] * COUNT, pod="b"), series([2.0, 8.0], pod="a")]})
    lines = {(to_hex(line.get_color()), line.get_ydata()[0]) for axes in figure.axes for line in axes.lines}
    assert {(NAMED["orange"], 5.0), (NAMED["red"], 9.0)} <= lines
    found = words(figure)
    assert found.index("a") < found.index("b"), "in the order of their names"
    assert found.count("8 s") == 2, "last and largest: there is nothing after it"


def test_buckets_are_drawn_as_what_is_in_them() -> None:
    panel = Panel("P", "", "s", (Query("v", "{{le}}"),), "heatmap")
    answer = [series([value] * COUNT, le=le) for le, value in (("+Inf", 9), ("0.1", 2), ("1", 9))]
    (mesh,) = [mesh for axes in drawn(panel, {"v": answer}).axes for mesh in axes.collections]
    assert mesh.get_array()[:, 0].tolist() == [2, 7]


@pytest.mark.parametrize("name", URLS)
def test_every_board_has_a_picture_in_the_guide(name: str) -> None:
    """Small enough for a page with all of them."""
    assert 10_000 < (FIGURES / f"{name}.png").stat().st_size < 200_000
    guide = (ROOT / "docs" / "how-to" / "monitor.md").read_text()
    assert re.search(rf"!\[[^]]+\]\(\.\./figures/{name}\.png\)", guide)


@pytest.mark.long
@pytest.mark.e2e
@needs_prometheus
async def test_run_is_recorded(tmp_path: Path) -> None:
    recording = await record(tmp_path, (10.0, 2.0, 2.0))
    requests = [query for query in recording.answers if query.startswith("sum by (status) (rate(millrace_requests")]
    assert requests and all(recording.answers[query] for query in requests)
    for board in recording.boards:
        Painter(recording).save(board, tmp_path / "picture.png")
