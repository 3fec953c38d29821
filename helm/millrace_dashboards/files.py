"""The files of the chart that are made here: `dashboards/<name>.json` and `alerts.yaml`."""

import json
from collections.abc import Mapping
from pathlib import Path

import yaml

from millrace_dashboards import alerts
from millrace_dashboards.alert import RUNBOOKS, Deployment, Thresholds
from millrace_dashboards.boards import dashboards

OUT = Path(__file__).parents[1] / "millrace" / "files"
HEAD = "# Written by `make dashboards`.\n"


def rendered(
    t: Thresholds = alerts.DEFAULTS, runbooks: str = RUNBOOKS, of: Deployment | None = None, grafana: str = ""
) -> dict[str, str]:
    """Path below the folder → text. Without `of`, alerts.yaml is for the chart, with placeholders; without `grafana`,
    the URL of a Grafana, links to panels are paths there.
    """
    boards = dashboards(t)
    rules = {alert.name: alert for group in alerts.groups(t).values() for alert in group}
    made = [(board, board.to_json(rules, boards)) for board in boards]
    panels = {
        panel["title"]: f"{grafana}{board.url}?viewPanel={panel['id']}"
        for board, content in made
        for panel in content["panels"]
    }
    texts = {f"dashboards/{board.name}.json": json.dumps(content, indent=1) + "\n" for board, content in made}
    text = alerts.to_json(t, runbooks, of or Deployment(), panels)
    return {**texts, "alerts.yaml": HEAD + yaml.safe_dump(text, sort_keys=False, width=10_000, allow_unicode=True)}


def write(files: Mapping[str, str], folder: Path) -> None:
    """Dashboards that are no longer made are removed."""
    for old in set((folder / "dashboards").glob("*.json")) - {folder / name for name in files}:
        old.unlink()
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
