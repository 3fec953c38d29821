"""Every rule, played to Prometheus's own rule tester: the fault that raises it, and what looks like it and is none.

faults.yaml has the faults. tests/e2e/test_prometheus.py inflicts some of them on real processes.
"""

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from millrace_dashboards import alerts, files
from millrace_dashboards.alert import Deployment
from millrace_dashboards.promql import filled
from millrace_testing.prometheus import binary, needs_prometheus

OF, GREEN = Deployment("n", "m", "blue"), Deployment("n", "m", "green")  # two releases of a model in a namespace
POD = f'{OF.matchers},pod="p"'
STARTED = f"millrace_start_timestamp_seconds{{{POD}}}"
WORDS = {"where": OF.matchers, "pod": POD, "gpu": 'Hostname="node",gpu="3"', "other_gpu": 'Hostname="node",gpu="4"'}
Series = dict[str, str]


@dataclass(frozen=True)
class Case:
    faulty: Series  # raises the alert
    sound: Series  # instead of the faulty series of the same name, or beside them: does not
    at: str = "30m"
    interval: str = "1m"
    why: str = ""  # what the sound series stand for


def named(series: Series) -> Series:
    return {filled(name, **WORDS): values for name, values in series.items()}


FAULTS = yaml.safe_load((Path(__file__).parent / "faults.yaml").read_text())
CASES = {name: Case(named(row.pop("faulty")), named(row.pop("sound")), **row) for name, row in FAULTS.items()}
OURS = {name: case for name, case in CASES.items() if not name.startswith("Gpu")}  # GPUs are of no deployment


def count(alerts: str) -> str:
    """How many are firing, whatever their labels."""
    return f'count(ALERTS{{alertstate="firing",{alerts}}}) or vector(0)'


def play(series: Series, case: Case, checks: Iterable[tuple[str, float]]) -> dict[str, Any]:
    inputs = [{"series": key, "values": values} for key, values in series.items()]
    tests = [
        {"expr": expr, "eval_time": case.at, "exp_samples": [{"labels": "{}", "value": value}]}
        for expr, value in checks
    ]
    return {"interval": case.interval, "input_series": inputs, "promql_expr_test": tests}


@cache
def all_rules(of: Deployment) -> list[dict[str, Any]]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load(files.rendered(of=of)["alerts.yaml"], loader)["groups"]


def rules(of: Deployment, only: str = "") -> str:
    """A rule file. `only`: an alert; without the other rules a test takes a tenth of the time."""
    groups = all_rules(of)
    if only:
        groups = [
            {"name": only, "rules": [row for group in groups for row in group["rules"] if row.get("alert") == only]}
        ]
    return yaml.safe_dump({"groups": groups})


def write(folder: Path, tests: list[dict[str, Any]], *of: Deployment, only: str = "") -> Path:
    """A file for promtool, with the rules of each deployment."""
    loaded = {f"{only}-{one.release}.yaml": rules(one, only) for one in of or (OF,)}
    for name, text in loaded.items():
        (folder / name).write_text(text)
    path = folder / f"{only}-tests.yaml"
    path.write_text(yaml.safe_dump({"rule_files": list(loaded), "tests": tests}))
    return path


def run(*files: Path) -> None:
    """All in one process, which names what failed by the file and the alert."""
    command = [binary("promtool"), "test", "rules", *files]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_alert_is_played() -> None:
    assert CASES.keys() == {alert.name for group in alerts.groups().values() for alert in group}


@needs_prometheus
def test_alert_fires_for_its_fault_and_only_then(tmp_path: Path) -> None:
    paths = []
    for name, case in CASES.items():
        alert = count(f'alertname="Millrace{name}"')
        faulty, sound = case.faulty, {**case.faulty, **case.sound}
        tests = [play(faulty, case, [(alert, 1)]), play(sound, case, [(alert, 0)])]
        paths.append(write(tmp_path, tests, only=f"Millrace{name}"))
    run(*paths)


@needs_prometheus
def test_group_that_is_made_again_and_again_restarts(tmp_path: Path) -> None:
    """Its pods have the same names and other addresses."""
    starts = {f'{STARTED[:-1]},instance="10.0.0.{n}"}}': f"_x{17 * n} {n}x11 stale" for n in range(1, 7)}
    once = dict(list(starts.items())[:1])
    case = CASES["Restarts"]
    alert = count('alertname="MillraceRestarts"')
    tests = [play(starts, case, [(alert, 1)]), play(once, case, [(alert, 0)])]
    run(write(tmp_path, tests, only="MillraceRestarts"))


@needs_prometheus
def test_other_deployments_are_not_ours(tmp_path: Path) -> None:
    """Another release of the same Prometheus has rules of its own, with its own thresholds and exceptions."""
    ours = count('alertname!="MillraceRoutersGone"')
    series: Series = {}
    for case in OURS.values():
        series |= case.faulty
    everything = Case(series, {}, at="2h")
    for other in (Deployment("elsewhere", "m", "blue"), Deployment("n", "another", "blue"), GREEN):
        run(write(tmp_path, [play(series, everything, [(ours, 0)])], other))


@needs_prometheus
def test_releases_of_a_namespace_do_not_mix(tmp_path: Path) -> None:
    """The fault of one is seen once, and what is sound of the other hides nothing."""
    paths = []
    for name, case in OURS.items():
        sound = {key.replace(OF.matchers, GREEN.matchers): values for key, values in (case.faulty | case.sound).items()}
        alert = f'alertname="Millrace{name}"'
        checks = [(count(alert), 1), (count(f'{alert},release="blue"'), 1)]
        paths.append(write(tmp_path, [play(case.faulty | sound, case, checks)], OF, GREEN, only=f"Millrace{name}"))
    run(*paths)


@needs_prometheus
def test_link_names_the_deployment_whatever_its_name(tmp_path: Path) -> None:
    of = Deployment("n", "org/m & more", "blue")
    alert = yaml.safe_load(rules(of, "MillraceNotReady"))["groups"][0]["rules"][0]
    link = alert["annotations"]["dashboard_url"]
    expected = f"{link.partition('&')[0]}&var-namespace=n&var-model=org%2Fm+%26+more&var-release=blue"
    (series,) = {f'millrace_workers{{{of.matchers},state="routable"}}'}
    fired = {
        "exp_labels": {"severity": "critical", "namespace": of.namespace, "model": of.model, "release": of.release},
        "exp_annotations": {
            "summary": f"{of.model}, release blue in n: no router has a pair of workers to send requests to.",
            "runbook_url": "docs/alerts/MillraceNotReady.md",
            "dashboard_url": expected,
        },
    }
    test = play({series: "0x40"}, Case({}, {}), [])
    test["alert_rule_test"] = [{"alertname": "MillraceNotReady", "eval_time": "30m", "exp_alerts": [fired]}]
    run(write(tmp_path, [test], of, only="MillraceNotReady"))


@needs_prometheus
def test_what_is_recorded(tmp_path: Path) -> None:
    pages = {"running": 30, "published": 20, "free": 40, "cached": 10}
    series = {f'millrace_kv_pages{{{POD},replica="0",use="{use}"}}': f"{n}x40" for use, n in pages.items()}
    for replica in range(2):
        for doing, number in {"running": 4, "waiting": 1}.items():
            series[f'millrace_sequences{{{POD},replica="{replica}",doing="{doing}"}}'] = f"{number}x40"
    checks = {
        'millrace_kv_use_ratio{namespace="n",pod="p"}': 0.5,
        'vllm:kv_cache_usage_perc{namespace="n",pod="p",model_name="m"}': 0.5,
        'vllm:num_requests_running{namespace="n",pod="p",model_name="m"}': 8,
        'vllm:num_requests_waiting{namespace="n",pod="p",model_name="m"}': 2,
    }
    run(write(tmp_path, [play(series, Case({}, {}), [(f"sum({expr})", value) for expr, value in checks.items()])]))
