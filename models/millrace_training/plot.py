"""Draws the log of a training run: losses and the accuracies of the probe, over tokens.

python -m millrace_training.plot LOG_JSONL OUT_SVG
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace_bench.tasks import TASKS

WIDTH, PANEL, MARGIN, GAP = 860, 230, 60, 50
LEGEND = 130
SMOOTHING = 0.9  # exponential, of the losses
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")
LOSS_TICKS = (0.8, 1.0, 1.5, 2.0, 3.0, 5.0)
ACCURACY_TICKS = (0.0, 0.25, 0.5, 0.75, 1.0)

Series = dict[str, list[tuple[float, float]]]


def draw(rows: list[dict[str, Any]]) -> str:
    losses: Series = {name: _smooth([(r["tokens"], r[name]) for r in rows]) for name in ("loss", "mtp_loss")}
    accuracies: Series = {name: [(r["tokens"], r[name]) for r in rows if name in r] for name in TASKS}
    end = rows[-1]["tokens"]
    height = 2 * PANEL + GAP + MARGIN + 20
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" font-family="sans-serif"',
        '  font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_panel("cross entropy (nats, logarithmic)", losses, 20, end, LOSS_TICKS, math.log),
        *_panel("accuracy on held-out items", accuracies, 20 + PANEL + GAP, end, ACCURACY_TICKS, lambda value: value),
        f'<text x="{WIDTH / 2}" y="{height - 8}" text-anchor="middle">tokens</text>',
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _panel(
    title: str, series: Series, top: float, end: float, ticks: tuple[float, ...], scale: Callable[[float], float]
) -> list[str]:
    right = WIDTH - LEGEND
    low, high = scale(ticks[0]), scale(ticks[-1])

    def x(tokens: float) -> float:
        return MARGIN + (right - MARGIN) * tokens / end

    def y(value: float) -> float:
        return top + PANEL - PANEL * (min(max(scale(value), low), high) - low) / (high - low)

    parts = [f'<text x="{MARGIN}" y="{top - 6}" font-weight="bold">{title}</text>']
    for tick in ticks:
        parts.append(f'<path d="M{MARGIN} {y(tick):.1f}H{right}" stroke="#ddd"/>')
        parts.append(f'<text x="{MARGIN - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for tick in range(0, int(end / 5e8) + 1):
        parts.append(f'<text x="{x(tick * 5e8):.1f}" y="{top + PANEL + 14}" text-anchor="middle">{tick / 2:g}B</text>')
    for row, ((name, points), colour) in enumerate(zip(series.items(), COLOURS, strict=False)):
        line = " ".join(f"{x(tokens):.1f},{y(value):.1f}" for tokens, value in points)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
        parts.append(f'<text x="{right + 10}" y="{top + 14 + 15 * row}" fill="{colour}">{name}</text>')
    return parts


def _smooth(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    smoothed, mean = [], points[0][1]
    for tokens, value in points:
        mean = SMOOTHING * mean + (1 - SMOOTHING) * value
        smoothed.append((tokens, mean))
    return smoothed


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw a training log.")
    parser.add_argument("log", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.write_text(draw([json.loads(line) for line in args.log.read_text("utf-8").splitlines()]), encoding="utf-8")


if __name__ == "__main__":
    main()
