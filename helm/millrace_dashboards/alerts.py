"""All rules as Prometheus reads them: rules.yaml with thresholds and the labels of a deployment."""

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from millrace_dashboards.alert import Alert, Deployment, Thresholds
from millrace_dashboards.promql import WHERE, filled, read, scoped

GPUS = "millrace-gpus"  # the chart leaves it out without monitoring.dcgm
VLLM = "millrace-vllm-names"  # and this one without monitoring.vllmNames
DEFAULTS, PLACEHOLDERS = Thresholds(), Deployment().matchers
RULES = Path(__file__).parent / "rules.yaml"


def groups(t: Thresholds = DEFAULTS, matchers: str = PLACEHOLDERS) -> dict[str, tuple[Alert, ...]]:
    """All alerts, by the name of their group. `matchers`: of the deployments that they are about."""
    words = {field.name: _text(getattr(t, field.name)) for field in fields(t)}

    def alert(name: str, row: Mapping[str, Any]) -> Alert:
        said = {key: filled(str(value), **words) for key, value in row.items()}
        return Alert(
            name,
            said["summary"],
            scoped(said["value"], matchers),
            getattr(t, row["limit"][1:]) if isinstance(row["limit"], str) else row["limit"],
            patience=said.get("for", "5m"),
            guard=scoped(said.get("guard", ""), matchers),
            by=tuple(said["by"].split(", ")) if "by" in said else WHERE,
            **{key: row[key] for key in ("severity", "unit", "sign") if key in row},
        )

    return {name: tuple(alert(*item) for item in rows.items()) for name, rows in read(RULES)["alerts"].items()}


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def recordings(matchers: str = PLACEHOLDERS) -> dict[str, dict[str, str]]:
    """Names and expressions that are recorded, by the name of their group."""
    return {
        name: {record: scoped(expr, matchers) for record, expr in rows.items()}
        for name, rows in read(RULES)["recorded"].items()
    }


def to_json(t: Thresholds, runbooks: str, of: Deployment, panels: Mapping[str, str]) -> dict[str, Any]:
    """A rule file of Prometheus, and the `spec` of a PrometheusRule. `panels`: title of an alert → URL of its panel."""
    recording = [
        {"name": name, "rules": [{"record": record, "expr": expr} for record, expr in rules.items()]}
        for name, rules in recordings(of.matchers).items()
    ]
    alerting = [
        {"name": name, "rules": [alert.to_json(panels[alert.title], runbooks, t.patience) for alert in alerts]}
        for name, alerts in groups(t, of.matchers).items()
    ]
    return {"groups": [*recording, *alerting]}
