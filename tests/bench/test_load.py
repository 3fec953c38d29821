"""The bench of loading weights, on a small model."""

from __future__ import annotations

import json
import sys

import pytest
from millrace_bench import load
from millrace_load.record import ROOT


@pytest.mark.parametrize("given", [True, pytest.param(False, marks=pytest.mark.long)])
def test_every_reader_has_two_rates(
    given: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {"hidden_size": 256, "moe_intermediate_size": 128, "intermediate_size": 256, "n_routed_experts": 16}
    monkeypatch.setattr(load, "WIDTHS", {**load.WIDTHS, **small, "num_hidden_layers": 2})
    model = ["--model", str(ROOT / "models" / "tiny")] if given else []
    monkeypatch.setattr(sys, "argv", ["load", "--rounds", "1", *model])
    load.main()
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    rows = record["results"]["rows"]
    assert {(row["reader"], row["pages"]) for row in rows} >= {
        (r, p) for r in ("raw", "ours") for p in ("cold", "warm")
    }
    assert all(row["gb_per_s"] >= 0 for row in rows) and record["results"]["bytes"] > 1 << 20
