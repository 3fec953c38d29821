"""The files of the chart that are made here: `dashboards/<name>.json` and `alerts.yaml`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from millrace_dashboards import alerts
from millrace_dashboards.alert import RUNBOOKS, Deployment, Thresholds
from millrace_dashboards.boards import DASHBOARDS

OUT = Path(__file__).parents[1] / "millrace" / "files"
HEAD = "# Written by `make dashboards`.\n"


def rendered(
    thresholds: Thresholds | None = None, runbooks: str = RUNBOOKS, of: Deployment | None = None
) -> dict[str, str]:
    """Path below the folder → text. Without `of`, alerts.yaml is for the chart, with placeholders."""
    boards = {f"dashboards/{board.name}.json": json.dumps(board.to_json(), indent=1) + "\n" for board in DASHBOARDS}
    rules = yaml.safe_dump(alerts.to_json(thresholds, runbooks, of), sort_keys=False, width=10_000, allow_unicode=True)
    return {**boards, "alerts.yaml": HEAD + rules}


def write(files: Mapping[str, str], folder: Path) -> None:
    """Dashboards that are no longer made are removed."""
    for old in set((folder / "dashboards").glob("*.json")) - {folder / name for name in files}:
        old.unlink()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def differing(files: Mapping[str, str], folder: Path) -> list[str]:
    """Names of files that are missing, different, or too many."""
    there = {f"dashboards/{path.name}" for path in (folder / "dashboards").glob("*.json")}
    wrong = {
        name for name, text in files.items() if not (folder / name).is_file() or (folder / name).read_text() != text
    }
    return sorted(wrong | (there - files.keys()))
