"""The part of Grafana's dashboard format that we use, as small typed values, and their layout.

A dashboard is rows of panels; panels flow from left to right in a grid of 24 columns. Grafana 9 and newer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from millrace_dashboards.promql import CATALOGUE, Scope

COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
# What dashboards look at: their variables and the time that Grafana finds right for the zoom.
VIEW = Scope('namespace=~"$namespace",model=~"$model"', "$__rate_interval")
ROLE_VIEW = Scope('namespace=~"$namespace",model=~"$model",component=~"$role"', "$__rate_interval")

Unit = Literal["short", "s", "reqps", "ops", "percentunit", "bytes", "Bps", "dateTimeFromNow"]
Object = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Query:
    expr: str
    legend: str = ""  # "{{label}}" stands for a label's value


@dataclass(frozen=True, slots=True)
class Panel:
    """`levels`: values from which a stat is orange and red."""

    title: str
    description: str
    unit: Unit
    queries: tuple[Query, ...]
    kind: Literal["timeseries", "stat", "heatmap", "bargauge"] = "timeseries"
    width: int = 8
    height: int = 8
    stacked: bool = False
    levels: tuple[float, float] | None = None

    def to_json(self, number: int, x: int, y: int) -> Object:
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
            "fieldConfig": {"defaults": self._defaults(), "overrides": []},
            "options": _OPTIONS[self.kind] | ({"yAxis": {"unit": self.unit}} if self.kind == "heatmap" else {}),
            "targets": targets,
        }

    def _defaults(self) -> Object:
        defaults: Object = {"unit": self.unit, "min": 0}
        if self.unit == "dateTimeFromNow":
            del defaults["min"]
        if self.levels is not None:
            steps: list[Object] = [{"color": "green", "value": None}]
            steps += [
                {"color": color, "value": value} for color, value in zip(("orange", "red"), self.levels, strict=True)
            ]
            defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        if self.kind == "timeseries":
            stacking = {"mode": "normal" if self.stacked else "none", "group": "A"}
            fill = 30 if self.stacked else 5
            defaults["custom"] = {"fillOpacity": fill, "lineWidth": 1, "showPoints": "never", "stacking": stacking}
        return defaults


@dataclass(frozen=True, slots=True)
class Row:
    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Dashboard:
    name: str  # of its file
    title: str
    description: str
    rows: tuple[Row, ...]
    by_role: bool = False  # it has the variable `role`: its queries are of ROLE_VIEW

    def to_json(self) -> Object:
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
                {"type": "dashboards", "title": "Millrace", "tags": ["millrace"], "keepTime": True, "includeVars": True}
            ],
            "templating": {"list": self._variables()},
            "panels": self._panels(),
        }

    def _variables(self) -> list[Object]:
        pairs, states = CATALOGUE["pairs"].name, CATALOGUE["state"].name
        variables = [
            {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
            _variable("namespace", f"label_values({pairs}, namespace)"),
            _variable("model", f'label_values({pairs}{{namespace=~"$namespace"}}, model)'),
        ]
        if self.by_role:
            query = f'label_values({states}{{namespace=~"$namespace",model=~"$model"}}, component)'
            variables.append(_variable("role", query))
        return variables

    def _panels(self) -> list[Object]:
        panels: list[Object] = []
        y = 0
        for row in self.rows:
            panels.append(_row(row.title, len(panels) + 1, y))
            x, y, height = 0, y + 1, 0
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    x, y, height = 0, y + height, 0
                panels.append(panel.to_json(len(panels) + 1, x, y))
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
