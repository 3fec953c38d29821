"""Alerts whose fault is hard to inflict on real processes, played to Prometheus's own rule tester.

Each entry: series (value notation of promtool: `a+bxn` is a, a+b, … n times) that must raise the alert, and what makes
it quiet again. The others are raised by real faults in tests/e2e/test_prometheus.py.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import yaml
from millrace_dashboards import files
from millrace_testing.prometheus import binary, needs_prometheus

POD = 'namespace="n",model="m",pod="p"'
Series = dict[str, str]
CASES: dict[str, tuple[Series, Series]] = {  # alert: series that raise it, series instead of them that do not
    "RetryBudgetEmpty": (
        {f"millrace_retries_refused_total{{{POD}}}": "0+3x40"},
        {f"millrace_retries_refused_total{{{POD}}}": "0x40"},
    ),
    "KvSlow": (
        {
            f"millrace_kv_bytes_total{{{POD}}}": "0+60000000000x40",
            f"millrace_kv_read_seconds_sum{{{POD}}}": "0+60x40",
        },
        {f"millrace_kv_read_seconds_sum{{{POD}}}": "0+2x40"},
    ),
    "LeasesLeak": (
        {f"millrace_leases{{{POD}}}": "5x40", 'millrace_active_requests{namespace="n",model="m",pod="r"}': "2x40"},
        {'millrace_active_requests{namespace="n",model="m",pod="r"}': "7x40"},
    ),
    "PagesInQuarantine": (
        {f"millrace_quarantined_pages{{{POD}}}": "4x40"},
        {f"millrace_quarantined_pages{{{POD}}}": "4 4 0 4 4 0 4 4 0 4 4 0 4 4 0 4 4 0 4 4 0 4 4 0 4 4 0 4 4 0 4 4 0"},
    ),
    "DecodeFull": (
        {
            f'millrace_kv_pages{{{POD},component="decode",replica="0",use="running"}}': "98x40",
            f'millrace_kv_pages{{{POD},component="decode",replica="0",use="free"}}': "2x40",
        },
        {f'millrace_kv_pages{{{POD},component="decode",replica="0",use="cached"}}': "50x40"},
    ),
    "TokenMismatches": (
        {f"millrace_token_mismatches_total{{{POD}}}": "0x27 1x12"},
        {f"millrace_token_mismatches_total{{{POD}}}": "1x40"},
    ),
    "WorkersShunned": (
        {
            f'millrace_ejected_workers{{{POD},role="decode"}}': "0x40",
            f'millrace_breakers{{{POD},role="decode",state="open"}}': "1x40",
        },
        {f'millrace_breakers{{{POD},role="decode",state="open"}}': "0x40"},
    ),
    "DiscoveryStale": (
        {
            f"millrace_discovery_last_sync_timestamp_seconds{{{POD}}}": "60x40",
            f'millrace_discovery_troubles_total{{{POD},kind="refused"}}': "0+1x40",
        },
        {f'millrace_discovery_troubles_total{{{POD},kind="refused"}}': "0x40"},
    ),
    "GcNotFrozen": (
        {
            f"millrace_start_timestamp_seconds{{{POD}}}": "10x40",
            f'millrace_worker_state{{{POD},state="ready"}}': "1x40",
        },
        {f'millrace_gc_frozen_objects{{{POD},process="frontend"}}': "1000x40"},
    ),
}
PLAYED = set(CASES)


def case(series: Series, name: str, fires: bool) -> dict[str, object]:
    inputs = [{"series": key, "values": values} for key, values in series.items()]
    # how many are firing, whatever their labels
    count = f'count(ALERTS{{alertname="Millrace{name}",alertstate="firing"}}) or vector(0)'
    checks = [{"expr": count, "eval_time": "30m", "exp_samples": [{"labels": "{}", "value": int(fires)}]}]
    return {"interval": "1m", "input_series": inputs, "promql_expr_test": checks}


@needs_prometheus
def test_alerts_fire_for_their_faults_and_only_then(tmp_path: Path) -> None:
    tests = []
    for name, (faulty, sound) in CASES.items():
        tests += [case(faulty, name, True), case({**faulty, **sound}, name, False)]
    script = tmp_path / "tests.yaml"
    script.write_text(yaml.safe_dump({"rule_files": [str(files.OUT / "alerts.yaml")], "tests": tests}))
    result = subprocess.run([binary("promtool"), "test", "rules", script], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
