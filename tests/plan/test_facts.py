"""The table of measurements is what bench/results has."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from millrace_serve.plan import facts
from millrace_testing.paths import ROOT

ROWS = [(kind, number, row) for kind in ("steps", "chunks", "gains") for number, row in enumerate(facts.raw()[kind])]


def at(place: str) -> Any:
    """What a file of bench/results has at FILE:PATH, and the object that it is a member of."""
    file, _, path = place.partition(":")
    results = json.loads((ROOT / "bench" / "results" / f"{file}.json").read_text())["results"]
    *parents, leaf = path.split(".")
    member = functools.reduce(lambda node, key: node[int(key) if key.isdigit() else key], parents, results)
    return member[leaf], member


@pytest.mark.parametrize(("kind", "number", "row"), ROWS, ids=[f"{kind}-{number}" for kind, number, _ in ROWS])
def test_every_number_is_that_of_its_file(kind: str, number: int, row: dict[str, Any]) -> None:
    sources = [name for name in row if name.endswith("_at")]
    assert sources, "a fact without a measurement"
    for name in sources:
        value, _ = at(row[name])
        assert row[name.removesuffix("_at")] == value, row[name]


@pytest.mark.parametrize("step", facts.steps(), ids=lambda step: step.ms_at)
def test_a_step_is_the_row_that_it_names(step: facts.TimedStep) -> None:
    _, row = at(step.ms_at)
    assert (step.rows, step.context) == (row.get("count", row.get("batch")), row.get("length", row.get("prompt")))
    assert step.kind == row["kind"] and row.get("kv_dtype", step.kv) == step.kv
    config = json.loads((ROOT / f"bench/results/{step.ms_at.partition(':')[0]}.json").read_text())["config"]
    assert config["layers"] == step.layers
    assert max(config.get("ranks", 1), config.get("dp", 1)) == step.ranks


@pytest.mark.parametrize("run", ["rank-bf16", "rank-fp8", "rank-tuned"])
def test_the_estimate_of_memory_holds_what_a_start_measured(run: str) -> None:
    """A worker that plans with it before its weights are there must not run out of memory."""
    estimated, _ = at(f"h100/{run}:memory.0.estimated")
    measured, _ = at(f"h100/{run}:memory.0.measured")
    assert 0.98 * sum(estimated.values()) < sum(measured.values()) <= sum(estimated.values())


@pytest.mark.parametrize(
    ("text", "kind"),
    [("Model: \t\t NVIDIA H200\nIRQ: 1\n", "H200"), ("Model: NVIDIA H100 80GB HBM3\n", "H100"), ("Model: A100\n", "")],
)
def test_the_driver_names_the_gpu(text: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    (tmp_path / "0000:01:00.0" / "information").write_text(text)
    assert facts.gpu_here(tmp_path) == kind
    assert facts.gpu_here(tmp_path / "absent") == ""
