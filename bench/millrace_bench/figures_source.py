"""Figures of committed runs, and the Markdown around them."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

from millrace_bench.common import ROOT

RESULTS = "bench/results"
Blocks = dict[str, Callable[[], str]]


@functools.cache
def results(name: str) -> dict[str, Any]:
    """Of a run: "h200/engine-tp8"."""
    found: dict[str, Any] = json.loads((ROOT / RESULTS / f"{name}.json").read_text())["results"]
    return found


def rows(name: str, kind: str = "rows", /, **where: Any) -> list[dict[str, Any]]:
    """The rows of a run that have these values. `kind`: of a run that has several lists of them."""
    return [one for one in results(name)[kind] if where.items() <= one.items()]


def row(name: str, kind: str = "rows", /, **where: Any) -> dict[str, Any]:
    """The one row of a run that has these values. LookupError: there is none, or more than one."""
    found = rows(name, kind, **where)
    if len(found) != 1:
        raise LookupError(f"{len(found)} rows of {name}.json have {where}")
    return found[0]


def source(*names: str) -> str:
    """Links to the JSON of runs, relative to the top folder."""
    return ", ".join(f"[{name.partition('/')[2]}]({RESULTS}/{name}.json)" for name in names)


def table(header: str, rows: Iterable[tuple[str, ...]]) -> str:
    """Markdown. `header` has the names of the columns with | between them."""
    columns = tuple(name.strip() for name in header.split("|"))
    lines = [columns, ("---",) * len(columns), *rows]
    assert all(len(line) == len(columns) for line in lines), header
    return "".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|\n" for line in lines).replace(
        " --- ", "---"
    )


def short(time: float) -> str:
    """Three digits, or all before the point."""
    return f"{time:,.0f}" if time >= 100 else f"{time:.1f}"
