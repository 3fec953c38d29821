"""Which points a picture has, and that it is drawn where matplotlib is installed."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from millrace_load import plots
from millrace_load.plots import PlotError, Point, draw, lines, points

TIMES = {"p50": 0.2, "p99": 0.5}


def report(goodput: float = 2.0) -> dict[str, Any]:
    return {"goodput": goodput, "completed": 6, "seconds": 2.0, "ttft": TIMES, "tpot": TIMES | {"p99": None}}


def serving(rate: float) -> dict[str, Any]:
    return {"bench": "serving", "config": {"request_rate": rate}, "results": report()}


def pd() -> dict[str, Any]:
    runs = [("long", "pair", 2.0), ("long", "pair", 1.0), ("short", "unified", 4.0)]
    return {
        "bench": "pd",
        "results": {"rows": [report() | {"load": load, "topology": name, "rate": rate} for load, name, rate in runs]},
    }


def test_a_duel_is_drawn_as_systems_are() -> None:
    rows = [{**row, "server": row["topology"]} for row in pd()["results"]["rows"]]
    assert points({"bench": "duel", "results": {"rows": rows}}) == points(pd())


def test_the_rate_of_a_closed_loop_is_what_it_completed() -> None:
    assert [point.rate for point in points(serving(5.0), "a") + points(serving(0.0), "a")] == [5.0, 3.0]


def test_points_are_ordered_by_load_system_and_rate() -> None:
    found = lines(points(pd()))
    assert {load: list(systems) for load, systems in found.items()} == {"long": ["pair"], "short": ["unified"]}
    assert [point.rate for point in found["long"]["pair"]] == [1.0, 2.0]
    assert found["short"]["unified"] == [Point("short", "unified", 4.0, 2.0, TIMES, TIMES | {"p99": None})]


@pytest.mark.parametrize("record", [{}, {"bench": "router", "results": {}}, {"bench": "serving", "results": {}}])
def test_another_record_is_refused(record: dict[str, Any]) -> None:
    with pytest.raises(PlotError, match=r"x\.json: not a result"):
        points(record, "x.json")


def test_a_missing_matplotlib_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plots.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlotError, match=r"millrace\[bench\]"):
        plots.check("load.svg")


@pytest.mark.parametrize("text", ["", "no json", "[1]", "{"])
def test_a_file_without_a_record_is_named(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    monkeypatch.setattr(sys, "argv", ["plots", str(tmp_path / "x.svg"), str(path)])
    with pytest.raises(SystemExit) as caught:
        plots.main()
    assert f"{path}: no JSON record" in str(caught.value.code)


def test_drawing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra bench)")
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    first.write_text(json.dumps(serving(5.0), indent=1))
    second.write_text("a table\n" + json.dumps(serving(6.0)) + "\n")
    svg, png = tmp_path / "load.svg", tmp_path / "load.png"
    monkeypatch.setattr(sys, "argv", ["plots", str(svg), str(first), str(second)])
    plots.main()
    for text in ("goodput, requests/s", "TTFT, ms", "TPOT, ms", "first p99", "second p50"):
        assert text in svg.read_text()
    draw(points(pd()), png)
    assert png.read_bytes().startswith(b"\x89PNG")


def test_a_system_has_one_colour_and_a_place_in_the_legend_whatever_loads_it_ran(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra bench)")
    draw(points(pd()), svg := tmp_path / "pd.svg")
    text = svg.read_text()
    assert "#1f77b4" in text and "#ff7f0e" in text, "the only system of the second load is the second system"
    assert "pair p50" in text and "unified p50" in text


def test_goodput_reaches_the_offered_rate_when_all_requests_are_within_the_limits() -> None:
    """Of a short run the last answers take a large part: goodput by the last answer never reaches the rate."""
    record = serving(5.0)
    record["results"] |= {"goodput": 3.0, "slo_met": 1.0}
    assert [point.goodput for point in points(record, "a")] == [5.0]


def test_a_picture_has_the_limits_the_hardware_and_the_day(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra bench)")
    record = pd() | {"config": {"slo": "ttft=1,tpot=0.04"}, "hardware": "2 x A100", "time": "2026-11-26T12:28:10Z"}
    assert plots._limit("ttft", {"pair": points(record)}) == 1000
    draw(points(record), svg := tmp_path / "pd.svg")
    assert "2 x A100, 2026-11-26" in svg.read_text()
