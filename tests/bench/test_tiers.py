"""The bench of the host tier, on a CPU: whether it runs, and what does not depend on time."""

import argparse
import json
from collections import Counter

import pytest
from millrace_bench import tiers
from millrace_serve.engine.sim.runner import SimSettings


def test_the_command_runs_whole_on_a_cpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the step that it takes there by itself."""
    monkeypatch.setattr(
        "sys.argv", ["tiers", "--pages", "1", "2", "--repeats", "1", "--clients", "1", "--length", "130"]
    )
    monkeypatch.setattr(tiers, "both", lambda kind, args: [{"engine": kind}])
    tiers.main()
    *lines, record = capsys.readouterr().out.splitlines()
    assert Counter(line.split()[0] for line in lines) == {"copies": 8, "steps": len(tiers.COPIES), "passes": 2}
    found = json.loads(record)["results"]
    assert [(row["pages"], row["order"], row["way"]) for row in found["copies"]] == [
        (pages, order, way) for pages in (1, 2) for order in ("adjacent", "scattered") for way in ("store", "load")
    ]
    assert [(row["copies"], row["step"]) for row in found["steps"]] == [
        (name, tiers.STEPS["cpu"][0]) for name, _, _ in tiers.COPIES
    ]
    assert all(row["gb_per_s"] > 0 for row in (*found["copies"], *found["steps"]))
    assert all(row["ms"] > 0 and row["beside_ms"] > 0 for row in found["steps"])


def test_the_second_pass_hits_with_the_tier_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "COSTS", SimSettings())
    without, with_tier = tiers.both("simulated", argparse.Namespace(clients=2, length=130, device="cpu"))
    assert without["host_pages"] == without["host_hits"] == without["device_hits"] == 0
    assert with_tier["host_hits"] + with_tier["device_hits"] == pytest.approx(128 / 130)
    assert with_tier["host_hits"] > 0.9
