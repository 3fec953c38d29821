"""Draws a board from its JSON and a recording, laid out as Grafana does.

What a panel shows, and in which colour, is in its JSON: nothing here knows a panel, a metric or an alert.
"""

import io
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from millrace_dashboards.grafana import COLUMNS
from numpy.typing import NDArray
from PIL import Image

from millrace_testing.pictures.record import Json, Recording

# Grafana's classic palette for lines, and its named colours.
PALETTE = ("#56a64b", "#e0a800", "#3274d9", "#ff780a", "#e02f44", "#a352cc", "#37872d", "#8ab8ff", "#ca95e5", "#705da0")
NAMED = {"green": "#56a64b", "orange": "#ff780a", "red": "#e02f44", "blue": "#3274d9", "purple": "#8f3bb8"}
GREY, FAINT = "#555555", "#d8d9da"
WIDTH, ROW, HEADER, DPI = 14.0, 0.36, 0.45, 80  # inches of a board, a unit of height and the line above; dots per inch
GAP, TITLE, LEGEND, LEFT, TICKS = 0.04, 0.26, 0.155, 0.62, 0.2  # inches in a panel
MOST_LINES = 5  # of a legend
COLORS = 140  # of a picture, besides its own
STYLE: Any = {"font.size": 8, "axes.edgecolor": FAINT, "xtick.color": GREY, "ytick.color": GREY}
PREFIXES = ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1.0, " "), (1e-3, " m"), (1e-6, " µ"))
SUFFIXES = {"s": "s", "reqps": "req/s", "ops": "/s", "Bps": "B/s", "bytes": "B"}
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Line:
    name: str
    values: Floats  # at the times of the recording; NaN where there is none
    labels: dict[str, str]

    def last(self) -> float:
        found = self.values[np.isfinite(self.values)]
        return float(found[-1]) if len(found) else math.nan


def text(value: float, unit: str) -> str:
    """As people read it: 0.0123 s is "12.3 ms"."""
    if not math.isfinite(value):
        return "-"
    if unit == "percentunit":
        return f"{100 * value:.3g} %"
    if unit == "dateTimeFromNow":  # seconds before the end
        return f"{value / 60:.0f} min ago"
    small = 1e-9 if unit == "s" else 1.0  # a thousandth of a request is no unit
    factor, prefix = next((row for row in PREFIXES if abs(value) >= max(row[0], small) * 0.9995), (1.0, " "))
    if unit == "s" and factor >= 1:
        return f"{value / 60:.3g} min" if abs(value) >= 120 else f"{value:.3g} s"
    return f"{value / factor:.3g}{prefix}{SUFFIXES.get(unit, '')}".strip()


class Painter:
    """Of one recording."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._minutes = np.arange(int((recording.end - recording.start) / recording.step) + 1) * recording.step / 60

    def save(self, board: Json, path: Path) -> None:
        """A PNG of few colours, which is a small one. Those of lines, limits and marks are among them."""
        drawn = io.BytesIO()
        with rc_context(STYLE):
            self.draw(board).savefig(drawn)
        picture = Image.open(drawn).convert("RGB")
        own = [round(255 * part) for color in (*NAMED.values(), *PALETTE) for part in to_rgb(color)]
        palette = Image.new("P", (1, 1))
        palette.putpalette([*(picture.quantize(COLORS).getpalette() or ()), *own])
        picture.quantize(palette=palette, dither=Image.Dither.NONE).save(path, optimize=True)

    def draw(self, board: Json) -> Figure:
        height = HEADER + ROW * max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in board["panels"])
        figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="#f4f5f5")
        chosen = "    ".join(f"{one['label']}: All" for one in board["templating"]["list"][1:])
        figure.text(0.006, 1 - 0.25 / height, board["title"], size=12, weight="bold")
        figure.text(0.994, 1 - 0.25 / height, chosen, size=9, color=GREY, ha="right")
        for number, mark in enumerate(board["annotations"]["list"]):
            color = NAMED[mark["iconColor"]]
            figure.text(0.3 + 0.085 * number, 1 - 0.25 / height, f"● {mark['name']}", size=9, color=color)
        for panel in board["panels"]:
            at = panel["gridPos"]
            bottom = height - HEADER - ROW * (at["y"] + at["h"])
            canvas = Canvas(figure, at["x"] / COLUMNS * WIDTH, bottom, at["w"] / COLUMNS * WIDTH, at["h"] * ROW)
            if panel["type"] == "row":
                canvas.write(GAP, 0.12, f"▾ {panel['title']}", size=10, weight="bold")
            else:
                self._panel(canvas, panel, board["annotations"]["list"])
        return figure

    def _panel(self, canvas: "Canvas", panel: Json, marks: list[Json]) -> None:
        canvas.frame(panel["title"])
        from_now = panel["fieldConfig"]["defaults"]["unit"] == "dateTimeFromNow"
        lines = [line for target in panel["targets"] for line in self._lines(target, from_now)]
        if not lines:
            canvas.write(canvas.width / 2, canvas.height / 2, "No data", size=10, ha="center", color=GREY)
            return
        kind, defaults = panel["type"], panel["fieldConfig"]["defaults"]
        if kind == "stat":
            _stat(canvas, lines, defaults)
        elif kind == "bargauge":
            _bars(canvas, lines, defaults)
        elif kind == "heatmap":
            self._heatmap(canvas, lines)
        else:
            self._curves(canvas, lines, defaults, marks)

    def _lines(self, target: Json, from_now: bool) -> Iterator[Line]:
        """In the order of their names, as Prometheus' answers have none. `from_now`: moments in ms become ages in s."""
        found = []
        for series in self._recording.answers[target["expr"]]:
            labels = series["metric"]
            name = _name(target["legendFormat"], labels)
            values = np.full(len(self._minutes), np.nan)
            for moment, value in series["values"]:
                values[round((moment - self._recording.start) / self._recording.step)] = float(value)
            ages = self._recording.end - values / 1000 if from_now else values
            found.append(Line(name, ages, labels))
        yield from sorted(found, key=lambda line: line.name)

    def _curves(self, canvas: "Canvas", lines: list[Line], defaults: Json, marks: list[Json]) -> None:
        unit, custom = defaults["unit"], defaults["custom"]
        axes = canvas.plot(min(len(lines), MOST_LINES) + 1)
        below = np.zeros(len(self._minutes))
        for number, line in enumerate(lines):
            color, values = PALETTE[number % len(PALETTE)], line.values
            if custom["stacking"]["mode"] == "normal":
                values = below + np.nan_to_num(values)
                axes.fill_between(self._minutes, below, values, color=color, alpha=0.35, lw=0)
                below = values
            axes.plot(self._minutes, values, color=color, lw=1.1)
        axes.set_xlim(0, self._minutes[-1])
        tops = [*(_largest(line) for line in lines), float(below.max())]
        low, high = min(0.0, *(-_largest(line, -1) for line in lines)), max(tops)
        high = high if high > 0 else 1 - (low < 0)
        axes.set_ylim(1.05 * low - 0.03 * (high - low), 1.08 * high + 0.02 * (high - low))
        self._limits(axes, defaults)
        for mark in marks:
            self._mark(axes, mark)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value, unit)))
        canvas.legend([(line.name, text(line.last(), unit), text(_largest(line), unit)) for line in lines])

    def _limits(self, axes: Axes, defaults: Json) -> None:
        if defaults["custom"]["thresholdsStyle"]["mode"] != "off":
            for step in defaults["thresholds"]["steps"][1:]:
                axes.axhline(step["value"], color=NAMED[step["color"]], lw=1.2, ls="--")

    def _mark(self, axes: Axes, mark: Json) -> None:
        """A line at each moment, or a shade over each time in which there is a series."""
        color, answers = NAMED[mark["iconColor"]], self._recording.answers[mark["expr"]]
        if mark.get("useValueForTime"):
            for moment in {float(value) / 1000 for series in answers for _, value in series["values"]}:
                axes.axvline((moment - self._recording.start) / 60, color=color, lw=0.8, ls=":")
            return
        there = np.zeros(len(self._minutes), dtype=bool)
        for series in answers:
            moments = np.array([moment for moment, _ in series["values"]])
            there[np.round((moments - self._recording.start) / self._recording.step).astype(int)] = True
        axes.fill_between(
            self._minutes, 0, 1, where=there, transform=axes.get_xaxis_transform(), color=color, alpha=0.13, lw=0
        )

    def _heatmap(self, canvas: "Canvas", lines: list[Line]) -> None:
        """Buckets of Prometheus are cumulative."""
        ordered = sorted(lines, key=lambda line: float(line.labels["le"]))
        counts = np.diff(np.nan_to_num([line.values for line in ordered]), axis=0, prepend=0.0)
        used = np.flatnonzero(counts.max(axis=1) > 0)
        rows = slice(used[0], used[-1] + 1) if len(used) else slice(0, 1)
        axes = canvas.plot(0)
        shown = np.where(counts[rows] > 0, counts[rows], np.nan)
        axes.pcolormesh(self._minutes, np.arange(len(shown)), shown, cmap="Oranges", shading="nearest")
        bounds = [text(float(line.labels["le"]), "s") for line in ordered[rows]]
        axes.set_yticks(np.arange(len(shown)), [f"≤ {bound}" for bound in bounds])


class Canvas:
    """The place of a panel. Lengths are inches, from its left and lower edge."""

    def __init__(self, figure: Figure, left: float, bottom: float, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._figure, self._left, self._bottom = figure, left, bottom

    def _axes(self, left: float, bottom: float, width: float, height: float) -> Axes:
        across, up = self._figure.get_size_inches()
        place = ((self._left + left) / across, (self._bottom + bottom) / up, width / across, height / up)
        return self._figure.add_axes(place)

    def write(self, x: float, y: float, words: str, **how: object) -> None:
        across, up = self._figure.get_size_inches()
        self._figure.text((self._left + x) / across, (self._bottom + y) / up, words, **how)  # type: ignore[arg-type]

    def frame(self, title: str) -> None:
        axes = self._axes(GAP, GAP, self.width - 2 * GAP, self.height - 2 * GAP)
        axes.set(xticks=[], yticks=[])
        self.write(0.12, self.height - TITLE + 0.04, title, size=9, weight="bold")

    def plot(self, legend: int) -> Axes:
        """Axes over a legend of so many lines."""
        low = TICKS + 0.08 + LEGEND * legend
        axes = self._axes(LEFT, low, self.width - LEFT - 0.15, self.height - TITLE - low - 0.05)
        axes.grid(color="#ececec", lw=0.6)
        axes.tick_params(length=0, labelsize=7)
        axes.yaxis.set_major_locator(MaxNLocator(4))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda minutes, _: f"{minutes:g} min"))
        axes.spines[["top", "right", "left"]].set_visible(False)
        return axes

    def legend(self, rows: list[tuple[str, str, str]]) -> None:
        """Name, last value and largest one of each line."""
        shown = rows[:MOST_LINES]
        right = self.width - 0.15
        for number, row in enumerate([("", "Last", "Max"), *shown]):
            y = 0.1 + LEGEND * (len(shown) - number)
            color = GREY if number == 0 else PALETTE[(number - 1) % len(PALETTE)]
            more = f"  (+{len(rows) - len(shown)})" if number == len(shown) < len(rows) else ""
            self.write(0.15, y, "" if number == 0 else "━", color=color, size=8, weight="bold")
            room = int((right - 1.35) / 0.065) - len(more)
            self.write(0.38, y, (row[0] if len(row[0]) <= room else f"{row[0][: room - 1]}…") + more, size=7)
            self.write(right - 0.8, y, row[1], size=7, ha="right", color=GREY if number == 0 else "black")
            self.write(right, y, row[2], size=7, ha="right", color=GREY if number == 0 else "black")

    def spark(self, values: Floats, color: str) -> None:
        axes = self._axes(0.1, 0.08, self.width - 0.2, self.height * 0.35)
        axes.fill_between(np.arange(len(values)), 0, values, color=color, alpha=0.2, lw=0)
        axes.plot(values, color=color, lw=1)
        axes.set_axis_off()

    def bar(self, y: float, share: float, color: str) -> None:
        axes = self._axes(1.6, y, (self.width - 2.6) * max(share, 0.004), 0.2)
        axes.add_patch(Rectangle((0, 0), 1, 1, color=color))
        axes.set_axis_off()


def _name(legend: str, labels: Json) -> str:
    return re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), legend).strip()


def _largest(line: Line, sign: int = 1) -> float:
    """With -1 as the sign: minus the smallest."""
    found = sign * line.values[np.isfinite(line.values)]
    return float(found.max()) if len(found) else math.nan


def _color(value: float, defaults: Json) -> str:
    steps = defaults.get("thresholds", {"steps": [{"color": "green", "value": None}]})["steps"]
    reached = [step for step in steps if step["value"] is None or value >= step["value"]]
    return NAMED[reached[-1]["color"]]


def _stat(canvas: Canvas, lines: list[Line], defaults: Json) -> None:
    """One number with its course, or a list of them."""
    unit = defaults["unit"]
    if len(lines) == 1:
        value = lines[0].last()
        color = _color(value, defaults)
        canvas.spark(lines[0].values, color)
        canvas.write(canvas.width / 2, canvas.height * 0.5, text(value, unit), size=19, ha="center", color=color)
        return
    for number, line in enumerate(lines):
        y = canvas.height - TITLE - 0.25 - 0.25 * number
        canvas.write(0.2, y, line.name, size=9)
        canvas.write(canvas.width - 0.2, y, text(line.last(), unit), size=9, ha="right", color=NAMED["green"])


def _bars(canvas: Canvas, lines: list[Line], defaults: Json) -> None:
    most = max((line.last() for line in lines), default=0.0) or 1.0
    for number, line in enumerate(lines):
        y = canvas.height - TITLE - 0.28 - 0.26 * number
        if y > 0.05:
            canvas.write(0.15, y + 0.05, line.name, size=8)
            canvas.bar(y, line.last() / most, _color(line.last(), defaults))
            canvas.write(canvas.width - 0.15, y + 0.05, text(line.last(), defaults["unit"]), size=8, ha="right")
