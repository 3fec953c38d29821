"""All dashboards: those of boards/*.yaml, and one with a panel for each alert, made from the rules."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from millrace_dashboards import alerts
from millrace_dashboards.alert import Alert, Thresholds
from millrace_dashboards.grafana import CHOSEN, LABELS, Dashboard, Panel, Query, Row
from millrace_dashboards.promql import WHERE, filled, read, scoped

FOLDER = Path(__file__).parent / "boards"
ORDER = ("overview", "waterfall", "kv-transfer", "router", "workers", "gc")
TITLES = {"service": "Service", "transfer": "KV pages", "processes": "Processes", "gpus": "GPUs"}
QUANTILES = {"p50": "0.5", "p90": "0.9", "p99": "0.99"}


def dashboards(t: Thresholds) -> tuple[Dashboard, ...]:
    return (*(_board(name) for name in ORDER), _alerts(t))


def _board(name: str) -> Dashboard:
    board = read(FOLDER / f"{name}.yaml")
    variables = tuple(board.get("variables", ("pod",)))
    matchers = ",".join((CHOSEN, *(f'{LABELS.get(name, name)}=~"${name}"' for name in variables)))
    rows = (Row(title, tuple(_panel(matchers, **row) for row in rows)) for title, rows in board["rows"].items())
    about = (board["title"], board["description"])
    return Dashboard(name, *about, tuple(rows), variables, **{key: board[key] for key in ("of",) if key in board})


def _panel(
    matchers: str,
    title: str,
    description: str,
    unit: Any,
    queries: Mapping[str, str] | None = None,
    quantiles: str = "",
    alerts: tuple[str, ...] = (),
    **more: Any,
) -> Panel:
    """`queries`: legend → expression. `quantiles`: a histogram with its labels, of which three quantiles are shown."""
    shown = queries or dict(_quantiles(quantiles))
    made = (Query(scoped(filled(expr, window="$__rate_interval"), matchers), legend) for legend, expr in shown.items())
    return Panel(title, description, unit, tuple(made), alerts=tuple(alerts), **more)


def _quantiles(histogram: str) -> Iterator[tuple[str, str]]:
    name, brace, labels = histogram.partition("{")
    for legend, q in QUANTILES.items():
        yield legend, f"histogram_quantile({q}, sum by (le) (rate({name}_bucket{brace}{labels}[$window])))"


def _alerts(t: Thresholds) -> Dashboard:
    rows = (
        Row(TITLES[name.removeprefix("millrace-")], tuple(_of_alert(alert) for alert in group))
        for name, group in alerts.groups(t, CHOSEN).items()
    )
    about = "Value and limit of every alert. Rules have no choice of pods, and so it has none."
    return Dashboard("alerts", "Alerts", about, tuple(rows), variables=())


def _of_alert(alert: Alert) -> Panel:
    guard = f" and this has one: `{alert.guard}`" if alert.guard else ""
    legend = " ".join(f"{{{{{label}}}}}" for label in alert.by if label not in WHERE[:2])
    about = f"Fires ({alert.severity}) while the value is {alert.condition}{guard}."
    query = Query(alert.value, legend)
    return Panel(alert.title, about, alert.unit, (query,), width=6, height=6, alerts=(alert.name,))
