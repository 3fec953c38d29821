"""The part of Grafana's dashboard format that we use, as small typed values, and their layout.

A dashboard is rows of panels; panels flow from left to right in a grid of 24 columns. Grafana 9 and newer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millrace_dashboards.alert import Alert, Unit
from millrace_dashboards.promql import CATALOGUE, WHERE, scoped

COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# What dashboards look at: their variables and the time that Grafana finds right for the zoom.
CHOSEN = ",".join(f'{label}=~"${label}"' for label in WHERE)
LABELS = {"role": "component"}  # variables that are not named as the label that they choose
COLORS = {"warning": "orange", "critical": "red"}
ABOVE_ZERO = 1e-9  # a colour of Grafana begins at its value, and `> 0` above it

Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""  # "{{label}}" stands for a label's value


@dataclass(frozen=True, slots=True)
class Panel:
    """`alerts`: names of those whose value the panel draws. It has their limits and colours, and links to them."""

    title: str
    description: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat", "heatmap", "bargauge"] = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    alerts: tuple[str, ...] = ()

    def to_json(self, number: int, x: int, y: int, rules: Sequence[Alert]) -> Object:
        targets = [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or "__auto",
                **_TARGET.get(self.kind, {}),
            }
            for index, query in enumerate(self.queries)
        ]
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.description,
            "datasource": DATASOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "links": [{"title": rule.title, "url": f"/alerting/list?search={rule.title}"} for rule in rules],
            "fieldConfig": {"defaults": self._defaults(rules), "overrides": []},
            "options": _OPTIONS[self.kind] | ({"yAxis": {"unit": self.unit}} if self.kind == "heatmap" else {}),
            "targets": targets,
        }

    def _defaults(self, rules: Sequence[Alert]) -> Object:
        defaults: Object = {"unit": self.unit} | ({"min": 0} if self.kind == "bargauge" else {})
        if rules:
            defaults["thresholds"] = {"mode": "absolute", "steps": steps(rules)}
        if self.kind == "timeseries":
            defaults["custom"] = {
                "axisSoftMin": 0,
                "fillOpacity": 30 if self.stacked else 5,
                "lineWidth": 1,
                "showPoints": "never",
                "stacking": {"mode": "normal" if self.stacked else "none", "group": "A"},
                "thresholdsStyle": {"mode": "dashed" if rules else "off"},
            }
        return defaults


def steps(rules: Sequence[Alert]) -> list[Object]:
    """Colours from each limit on. Either all rules are about values that are too high, or all about too low ones."""
    ordered = sorted((rule.limit or ABOVE_ZERO, COLORS[rule.severity]) for rule in rules)
    values, colors = [None, *(limit for limit, _ in ordered)], [color for _, color in ordered]
    [low] = {rule.sign in ("<", "==") for rule in rules}
    sound = [*colors, "green"] if low else ["green", *colors]
    return [{"color": color, "value": value} for color, value in zip(sound, values, strict=True)]


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    """`variables`: what people choose besides the deployment. `of`: a metric of all pods that they choose from."""

    name: str  # of its file
    title: str
    description: str
    rows: tuple[Row, ...]
    variables: tuple[str, ...] = ("pod",)
    of: str = "started"

    @property
    def url(self) -> str:
        return f"/d/millrace-{self.name}"

    def to_json(self, rules: Mapping[str, Alert], boards: "Sequence[Dashboard]") -> Object:
        """`rules`: all alerts, by name. `boards`: those that it leads to, with the same deployment chosen."""
        chosen = "&".join(f"${{{name}:queryparam}}" for name in ("datasource", *WHERE))
        return {
            "uid": f"millrace-{self.name}",
            "title": f"Millrace / {self.title}",
            "description": self.description,
            "tags": ["millrace"],
            "schemaVersion": 39,
            "editable": True,
            "graphTooltip": 1,
            "refresh": "30s",
            "time": {"from": "now-1h", "to": "now"},
            "links": [
                {"type": "link", "title": board.title, "url": f"{board.url}?{chosen}", "keepTime": True}
                for board in boards
            ],
            "annotations": {"list": MARKS},
            "templating": {"list": self._variables()},
            "panels": self._panels(rules),
        }

    def _variables(self) -> list[Object]:
        """Each offers what the ones before it leave."""
        made: list[Object] = [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
        ]
        matchers: list[str] = []
        for name in (*WHERE, *self.variables):
            label = LABELS.get(name, name)
            series = f"{CATALOGUE[self.of].name}{{{','.join(matchers)}}}"
            made.append(_variable(name, f"label_values({series}, {label})"))
            matchers.append(f'{label}=~"${name}"')
        return made

    def _panels(self, rules: Mapping[str, Alert]) -> list[Object]:
        panels: list[Object] = []
        y = 0
        for row in self.rows:
            panels.append(_row(row.title, len(panels) + 1, y))
            x, y, height = 0, y + 1, 0
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    x, y, height = 0, y + height, 0
                limits = [rules[name] for name in panel.alerts]
                panels.append(panel.to_json(len(panels) + 1, x, y, limits))
                x, height = x + panel.width, max(height, panel.height)
            y += height
        return panels


_LEGEND = {"displayMode": "table", "placement": "bottom", "showLegend": True, "calcs": ["lastNotNull", "max"]}
_LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}
_OPTIONS: dict[str, Object] = {
    "timeseries": {"legend": _LEGEND, "tooltip": {"mode": "multi", "sort": "desc"}},
    "stat": {"reduceOptions": _LAST, "colorMode": "value", "graphMode": "area", "textMode": "auto"},
    "bargauge": {"reduceOptions": _LAST, "displayMode": "basic", "orientation": "horizontal"},
    "heatmap": {"calculate": False, "color": {"mode": "scheme", "scheme": "Oranges"}, "legend": {"show": True}},
}
_TARGET: dict[str, Object] = {"heatmap": {"format": "heatmap"}, "bargauge": {"instant": True}}


def _variable(name: str, query: str) -> Object:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }


def _row(title: str, number: int, y: int) -> Object:
    position = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": position, "panels": []}


def _mark(name: str, color: str, expr: str, text: str, **more: bool) -> Object:
    return {
        "name": name,
        "datasource": DATASOURCE,
        "enable": True,
        "iconColor": color,
        "expr": expr,
        "step": "1m",
        "titleFormat": name,
        "textFormat": text,
        **more,
    }


_WEIGHTS = f"({CATALOGUE['weights'].name}"
_NEW, _OLD = (f"sum by (component, version) {_WEIGHTS}{offset})" for offset in ("", " offset 1m"))
_STARTED = f"{CATALOGUE['started'].name}{{{CHOSEN}}}"
MARKS = [  # of roll-outs and alerts, in all panels
    _mark("Start", "blue", f"{_STARTED} * 1000", "{{component}} {{pod}}", useValueForTime=True),
    _mark("New weights", "purple", scoped(f"{_NEW} unless {_OLD}", CHOSEN), "{{component}} {{version}}"),
    _mark("Alert", "red", f'ALERTS{{alertstate="firing",alertname=~"Millrace.+",{CHOSEN}}}', "{{alertname}} {{pod}}"),
]
