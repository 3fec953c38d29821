"""Every rule, played to Prometheus's own rule tester: the fault that raises it, and what looks like it and is none.

Values are in promtool's notation: `a+bxn` is a, a+b, … n steps further; `_xn` are n scrapes that fail; `stale` ends a
series. tests/e2e/test_prometheus.py inflicts most of the faults on real processes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from millrace_dashboards import alerts, files
from millrace_dashboards.alert import Deployment
from millrace_testing.prometheus import binary, needs_prometheus

OF, GREEN = Deployment("n", "m", "blue"), Deployment("n", "m", "green")  # two releases of a model in a namespace
WHERE = OF.matchers
POD = f'{WHERE},pod="p"'
GPU = 'Hostname="node",gpu="3"'
Series = dict[str, str]


@dataclass(frozen=True)
class Case:
    faulty: Series  # raises the alert
    sound: Series  # instead of the faulty series of the same name, or beside them: does not
    at: str = "30m"
    interval: str = "1m"
    why: str = ""  # what the sound series stand for


def requests(**rates: int) -> Series:
    """Requests per minute, by how they ended."""
    return {f'millrace_requests_total{{{POD},api="grpc",status="{name}"}}': f"0+{n}x150" for name, n in rates.items()}


def histogram(name: str, labels: str, **per_minute: int) -> Series:
    """Observations per minute up to each bound; `le_0_25` stands for 0.25."""
    bounds = {key.removeprefix("le_").replace("_", "."): n for key, n in per_minute.items()}
    series = {bound: f"0+{n}x150" for bound, n in bounds.items()} | {"+Inf": f"0+{max(bounds.values())}x150"}
    return {f'{name}_bucket{{{POD}{labels},le="{bound}"}}': values for bound, values in series.items()}


def workers(role: str, discovered: int, routable: int) -> Series:
    states = {"discovered": discovered, "routable": routable}
    return {f'millrace_workers{{{POD},role="{role}",state="{state}"}}': f"{n}x150" for state, n in states.items()}


def gpu(name: str, values: str, labels: str = GPU) -> Series:
    return {f"DCGM_FI_DEV_{name}{{{labels}}}": values}


STARTED = f"millrace_start_timestamp_seconds{{{POD}}}"
READY = f'millrace_worker_state{{{POD},state="ready"}}'
FIRST, BETWEEN = "millrace_stage_seconds", "millrace_inter_token_seconds"
STAGE = ',stage="first_token"'
LAG = "millrace_event_loop_lag_seconds"
PROMPTS = f'millrace_engine_total{{{POD},component="prefill",replica="0",what="prompt_tokens"}}'
OTHER_GPU = 'Hostname="node",gpu="4"'
SERVICE = {
    "RoutersGone": Case(
        {f'millrace_workers{{{POD},role="prefill",state="routable"}}': "1x10 stale"},
        {f'millrace_workers{{{POD},role="prefill",state="routable"}}': "0x40"},
        why="routers that have no workers are another matter",
    ),
    "RouterDown": Case(
        {f'up{{{POD},component="router"}}': "1x10 0x30"},
        {f'up{{{POD},component="router"}}': "1x27 0x2 1x10"},
        why="two scrapes fail",
    ),
    "NotReady": Case(workers("decode", 1, 0), workers("decode", 1, 1)),
    "Errors": Case(requests(internal=1, ok=9), requests(internal=1, ok=30)),
    "ManyErrors": Case(requests(worker_lost=3, ok=7), requests(worker_lost=1, ok=9)),
    "Retries": Case(
        {
            f'millrace_retries_total{{{POD},reason="STALLED"}}': "0+1x40",
            f'millrace_decisions_total{{{POD},way="pair"}}': "0+10x40",
        },
        {f'millrace_decisions_total{{{POD},way="pair"}}': "0+30x40"},
    ),
    "RetryBudgetEmpty": Case(
        {f"millrace_retries_refused_total{{{POD}}}": "0+3x40"}, {f"millrace_retries_refused_total{{{POD}}}": "3x40"}
    ),
    "FirstTokenSlow": Case(histogram(FIRST, STAGE, le_5=90, le_10=100), histogram(FIRST, STAGE, le_5=100, le_10=100)),
    "TokensSlow": Case(histogram(BETWEEN, "", le_0_25=90, le_0_5=100), histogram(BETWEEN, "", le_0_25=100, le_0_5=100)),
    "QueueGrows": Case(
        {f"millrace_queue_requests{{{POD}}}": "1+1x40"},
        {f"millrace_queue_requests{{{POD}}}": "20x40"},
        why="a long queue that stays as it is",
    ),
    "RequestsRefused": Case(requests(queue_full=1, ok=9), requests(queue_full=0, ok=9)),
}
TRANSFER = {
    "KvTransfersFail": Case(
        {f'millrace_kv_failures_total{{{POD},reason="STALLED"}}': "0+1x40"},
        {
            f'millrace_kv_failures_total{{{POD},reason="STALLED"}}': "1x40",
            f'millrace_kv_failures_total{{{POD},reason="CANCELLED"}}': "0+1x40",
        },
        why="clients that go away",
    ),
    "KvSlow": Case(
        {
            f"millrace_kv_bytes_total{{{POD}}}": "0+60000000000x40",
            f"millrace_kv_read_seconds_sum{{{POD}}}": "0+60x40",
        },
        {f"millrace_kv_read_seconds_sum{{{POD}}}": "0+2x40"},
    ),
    "PrefillIdle": Case(
        {PROMPTS: "50x40", **requests(ok=9), **workers("prefill", 1, 1)}, {PROMPTS: "0+50x40"}, why="it computes"
    ),
    "TokenMismatches": Case(
        {f"millrace_token_mismatches_total{{{POD}}}": "0x27 1x12"},
        {f"millrace_token_mismatches_total{{{POD}}}": "1x40"},
    ),
    "LeasesExpire": Case(
        {f'millrace_leases_ended_total{{{POD},outcome="expired"}}': "0+1x40"},
        {
            f'millrace_leases_ended_total{{{POD},outcome="expired"}}': "0x40",
            f'millrace_leases_ended_total{{{POD},outcome="released"}}': "0+1x40",
        },
    ),
    "LeasesLeak": Case(
        {f"millrace_leases{{{POD}}}": "5x40", f'millrace_active_requests{{{WHERE},pod="r"}}': "2x40"},
        {f'millrace_active_requests{{{WHERE},pod="r"}}': "7x40"},
    ),
    "PagesInQuarantine": Case(
        {f"millrace_quarantined_pages{{{POD}}}": "4x40"},
        {f"millrace_quarantined_pages{{{POD}}}": "4 4 0 4 4 0 4 4 0 4 4 0 4 4 0 4 4 0 4 4 0 4 4 0 4 4 0 4 4 0 4 4 0"},
        why="each read ends after a while",
    ),
    "DecodeFull": Case(
        {
            f'millrace_kv_pages{{{POD},component="decode",replica="0",use="running"}}': "98x40",
            f'millrace_kv_pages{{{POD},component="decode",replica="0",use="free"}}': "2x40",
        },
        {f'millrace_kv_pages{{{POD},component="decode",replica="0",use="cached"}}': "50x40"},
    ),
}
# A start takes 12 minutes, then the worker dies, and Kubernetes waits for 5: seen once a minute.
LOADS_AND_DIES = " ".join(f"{start}x11 _x4" for start in range(1, 10))
PROCESSES = {
    "WorkersNotRoutable": Case(workers("prefill", 2, 1), workers("prefill", 2, 2), at="45m"),
    "WorkersShunned": Case(
        {f'millrace_ejected_workers{{{POD},role="decode"}}': "1x40"},
        {f'millrace_ejected_workers{{{POD},role="decode"}}': "0x40"},
    ),
    "WorkerNotReady": Case(
        {READY: " ".join(["0x11 _x4"] * 9)}, {READY: "0x55 1x95"}, at="2h", why="a start that takes 55 minutes"
    ),
    "Restarts": Case({STARTED: LOADS_AND_DIES}, {STARTED: "1x70 2x80"}, at="2h", why="one restart"),
    "MetricsMissing": Case(workers("decode", 1, 1), {READY: "1x40"}),
    "DiscoveryStale": Case(
        {
            f"millrace_discovery_last_sync_timestamp_seconds{{{POD}}}": "60x40",
            f'millrace_discovery_troubles_total{{{POD},kind="refused"}}': "0+1x40",
        },
        {f'millrace_discovery_troubles_total{{{POD},kind="refused"}}': "0x40"},
        why="nothing changes",
    ),
    "FilesNotUsed": Case(
        {f'millrace_reloads_total{{{POD},what="api_keys",outcome="failed"}}': "0x20 1x20"},
        {
            f'millrace_reloads_total{{{POD},what="api_keys",outcome="failed"}}': "0x40",
            f'millrace_reloads_total{{{POD},what="api_keys",outcome="used"}}': "0x20 1x20",
        },
    ),
    "GcPauses": Case(
        {
            f'millrace_gc_pause_seconds_count{{{POD},process="rank",generation="2"}}': "0+2x40",
            f'millrace_gc_pause_seconds_bucket{{{POD},process="rank",generation="2",le="0.1"}}': "0+1x40",
        },
        {f'millrace_gc_pause_seconds_bucket{{{POD},process="rank",generation="2",le="0.1"}}': "0+2x40"},
    ),
    "GcNotFrozen": Case(
        {STARTED: "10x40", READY: "1x40"}, {f'millrace_gc_frozen_objects{{{POD},process="frontend"}}': "1000x40"}
    ),
    "EventLoopLags": Case(
        histogram(LAG, ',process="router"', le_0_25=90, le_0_5=100),
        histogram(LAG, ',process="router"', le_0_25=100, le_0_5=100),
    ),
}
GPUS = {
    "GpuXid": Case(
        gpu("XID_ERRORS", "0x20 79x20"), gpu("XID_ERRORS", "0x20 31x20"), why="a program read where it must not"
    ),
    "GpuMemoryErrors": Case(
        gpu("UNCORRECTABLE_REMAPPED_ROWS", "1x20 2x20"), gpu("UNCORRECTABLE_REMAPPED_ROWS", "2x40"), why="long ago"
    ),
    "GpuMemoryBroken": Case(gpu("ROW_REMAP_FAILURE", "1x40"), gpu("ROW_REMAP_FAILURE", "0x40")),
    "GpuNvlinkErrors": Case(
        gpu("NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "0x20 1x20"), gpu("NVLINK_RECOVERY_ERROR_COUNT_TOTAL", "1x40")
    ),
    "GpuSlow": Case(
        gpu("SM_CLOCK", "1200x40") | gpu("SM_CLOCK", "1980x40", OTHER_GPU) | gpu("GPU_UTIL", "99x40"),
        gpu("GPU_UTIL", "0x40"),
        why="it has nothing to do",
    ),
}
CASES = SERVICE | TRANSFER | PROCESSES | GPUS


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
def test_a_group_that_is_made_again_and_again_restarts(tmp_path: Path) -> None:
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
    for case in (SERVICE | TRANSFER | PROCESSES).values():
        series |= case.faulty
    everything = Case(series, {}, at="2h")
    for other in (Deployment("elsewhere", "m", "blue"), Deployment("n", "another", "blue"), GREEN):
        run(write(tmp_path, [play(series, everything, [(ours, 0)])], other))


@needs_prometheus
def test_releases_of_a_namespace_do_not_mix(tmp_path: Path) -> None:
    """The fault of one is seen once, and what is sound of the other hides nothing."""
    paths = []
    for name, case in (SERVICE | TRANSFER | PROCESSES).items():
        sound = {key.replace(OF.matchers, GREEN.matchers): values for key, values in (case.faulty | case.sound).items()}
        alert = f'alertname="Millrace{name}"'
        checks = [(count(alert), 1), (count(f'{alert},release="blue"'), 1)]
        paths.append(write(tmp_path, [play(case.faulty | sound, case, checks)], OF, GREEN, only=f"Millrace{name}"))
    run(*paths)


@needs_prometheus
def test_a_link_names_the_deployment_whatever_its_name(tmp_path: Path) -> None:
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
