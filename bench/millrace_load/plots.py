"""Pictures of load runs: goodput, TTFT and TPOT against the rate of requests.

python -m millrace_load.plots FILE.svg RESULT.json ...      results of `bench serving`, `pd`, `duel`; .svg or .png

A row of three axes for each load (two length mixes, say), a line for each system, in one colour and with one mark
everywhere. Goodput is the offered rate times the share of requests within the limits, so it reaches the rate when all
are. A dotted line is the rate itself, or the limit of the figure. The title has the hardware and the day.
Without matplotlib, which is in the extra `bench`: PlotError.
"""

import argparse
import importlib.util
import json
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUFFIXES = (".svg", ".png")
PERCENTILES = {"p50": "-", "p99": "--"}  # to the style of its line
MILLISECONDS = 1e3
INCHES = (4.2, 3.0)  # of one pair of axes
MARKS = "os^Dv"
LIMIT = {"color": "0.4", "linestyle": ":", "linewidth": 1.2}


class PlotError(ValueError):
    """The picture cannot be drawn; the message is for the user."""


@dataclass(frozen=True, slots=True)
class Point:
    """One run. `rate` is the offered one, in a closed loop that of completed requests."""

    load: str
    system: str
    rate: float  # requests per second, as goodput
    goodput: float
    ttft: Mapping[str, float | None]  # percentile → seconds; None where nothing was measured
    tpot: Mapping[str, float | None]
    slo: str = ""  # limits in seconds: ttft=1,tpot=0.04
    where: str = ""  # hardware and day


def check(path: str | Path) -> Path:
    """PlotError when no picture can be written there. Empty: none is wanted."""
    if path and Path(path).suffix not in SUFFIXES:
        raise PlotError(f"plot {str(path)!r} must end in {' or '.join(SUFFIXES)}")
    if path and importlib.util.find_spec("matplotlib") is None:
        raise PlotError("plot needs matplotlib: pip install 'millrace[bench]'")
    return Path(path)


def points(record: Mapping[str, Any], name: str = "") -> list[Point]:
    """Of a record of `bench serving`, where `name` is the system's, or of `bench pd` or `duel`. PlotError for another
    bench.
    """
    results = record.get("results", {})
    if system := {"pd": "topology", "duel": "server"}.get(record.get("bench", "")):
        return [_point(record, row, row["load"], row[system], row["rate"]) for row in results["rows"]]
    if record.get("bench") == "serving" and "goodput" in results:
        rate = record["config"].get("request_rate") or results["completed"] / results["seconds"]
        return [_point(record, results, "", name, rate)]
    raise PlotError(f"{name or 'the record'}: not a result of bench serving, pd or duel")


def _point(record: Mapping[str, Any], report: Mapping[str, Any], load: str, system: str, rate: float) -> Point:
    goodput = rate * report["slo_met"] if report.get("slo_met") is not None else report["goodput"]
    where = ", ".join(filter(None, (record.get("hardware", ""), record.get("time", "")[:10])))
    slo = record.get("config", {}).get("slo") or ""
    return Point(load, system, rate, goodput, report["ttft"], report["tpot"], str(slo), where)


def lines(given: Sequence[Point]) -> dict[str, dict[str, list[Point]]]:
    """Load → system → points in ascending order of rate. Loads and systems are in the order in which they are given."""
    found: dict[str, dict[str, list[Point]]] = defaultdict(lambda: defaultdict(list))
    for point in given:
        found[point.load][point.system].append(point)
    return {
        load: {system: sorted(run, key=lambda point: point.rate) for system, run in systems.items()}
        for load, systems in found.items()
    }


def draw(given: Sequence[Point], path: Path) -> None:
    """PlotError as of `check`."""
    check(path)
    import matplotlib
    from matplotlib.figure import Figure

    loads = lines(given)
    systems_of_all = dict.fromkeys(point.system for point in given)
    styles = {
        system: {"color": f"C{number}", "marker": MARKS[number % len(MARKS)], "markersize": 7 - 1.5 * (number % 3)}
        for number, system in enumerate(systems_of_all)
    }
    with matplotlib.rc_context({"svg.hashsalt": "millrace", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(3 * INCHES[0], len(loads) * INCHES[1] + 0.6), layout="constrained")
        for row, (load, systems) in zip(figure.subplots(len(loads), 3, squeeze=False), loads.items(), strict=True):
            for axes, what in zip(row, ("goodput", "ttft", "tpot"), strict=True):
                _fill(axes, what, systems, styles)
            row[0].set_title(load, loc="left")
        figure.suptitle("; ".join(dict.fromkeys(point.where for point in given if point.where)))
        every = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        figure.legend(every.values(), every.keys(), loc="outside lower center", ncols=3)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def draw_changes(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Rows of `bench pd --changing` for whole runs: for each system goodput, duties and queues over time."""
    check(path)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.4 * INCHES[0], len(rows) * INCHES[1] + 0.6), layout="constrained")
    for (left, right), row in zip(figure.subplots(len(rows), 2, squeeze=False), rows, strict=True):
        left.set_title(row["topology"], loc="left")
        for key, style in (("due", LIMIT), ("met", {"color": "C0"})):
            left.step([at["second"] for at in row["timeline"]], [at[key] for at in row["timeline"]], label=key, **style)
        seconds = [at["second"] for at in row["watched"]]
        for duty in dict.fromkeys(duty for at in row["watched"] for duty in at["duties"]):
            right.step(seconds, [at["duties"].get(duty, 0) for at in row["watched"]], label=duty)
        queue = right.twinx()
        queue.plot(seconds, [at["waiting_tokens"] for at in row["watched"]], label="prompt tokens that wait", **LIMIT)
        for axes, what in ((left, "requests/s"), (right, "workers"), (queue, "tokens")):
            axes.set_ylabel(what)
            axes.set_xlabel("s")
            axes.set_ylim(bottom=0)
            axes.legend(fontsize=7, loc="upper left" if axes is not queue else "upper right")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _fill(axes: Any, what: str, systems: Mapping[str, Sequence[Point]], styles: Mapping[str, Any]) -> None:
    axes.set_xlabel("requests/s")
    axes.set_ylabel("goodput, requests/s" if what == "goodput" else f"{what.upper()}, ms")
    for system, run in systems.items():
        rates = [point.rate for point in run]
        if what == "goodput":
            axes.plot(rates, [point.goodput for point in run], clip_on=False, zorder=3, **styles[system])
            axes.plot([0, *rates], [0, *rates], **LIMIT)
            continue
        for percentile, line in PERCENTILES.items():
            values = [_ms(getattr(point, what)[percentile]) for point in run]
            label = f"{system} {percentile}".strip()
            axes.plot(rates, values, linestyle=line, label=label, clip_on=False, zorder=3, **styles[system])
    if (limit := _limit(what, systems)) is not None:
        axes.axhline(limit, **LIMIT)
    axes.margins(0.08)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)


def _limit(what: str, systems: Mapping[str, Sequence[Point]]) -> float | None:
    """Milliseconds, of the first run that has a limit of this figure."""
    slos = (
        dict(part.split("=") for part in point.slo.split(",") if "=" in part)
        for run in systems.values()
        for point in run
    )
    return next((MILLISECONDS * float(slo[what]) for slo in slos if what in slo), None)


def _ms(seconds: float | None) -> float:
    return float("nan") if seconds is None else MILLISECONDS * seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="A picture of the results of bench serving, pd and duel.")
    parser.add_argument("picture", type=Path, help=" or ".join(SUFFIXES))
    parser.add_argument("results", type=Path, nargs="+", help="files with a JSON record; a system is named by its file")
    args = parser.parse_args()
    try:
        records = {path.stem: _read(path) for path in args.results}
        rows = [row for record in records.values() for row in record["results"].get("rows", ()) if "timeline" in row]
        if rows:
            draw_changes(rows, args.picture)
        else:
            draw([point for name, record in records.items() for point in points(record, name)], args.picture)
    except PlotError as error:
        sys.exit(str(error))


def _read(path: Path) -> dict[str, Any]:
    """The record in a file, of one line or of several; before it may stand what a bench printed."""
    try:
        text = path.read_text()
        record = json.loads(text) if text.startswith("{") else json.loads(text.splitlines()[-1])
    except (OSError, ValueError, IndexError) as error:
        raise PlotError(f"{path}: no JSON record: {error}") from None
    if not isinstance(record, dict):
        raise PlotError(f"{path}: no JSON record")
    return record


if __name__ == "__main__":
    main()
