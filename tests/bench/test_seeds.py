"""docs/seeds.md: every known optimisation has a row, and what a row names is there."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from millrace_bench import figures_seeds, figures_source, onoff
from millrace_bench.figures_seeds import DOCUMENT, FIGURES, lines
from millrace_serve.worker.config import WorkerConfig
from millrace_testing.paths import ROOT
from pydantic import BaseModel

COUNTS = {"G": 14, "M": 12, "A": 13, "X": 9, "P": 7, "S": 3, "T": 4}
FOLDERS = {
    "K": "kernels/millrace_kernels",
    "S": "services/millrace_serve",
    "B": "bench/millrace_bench",
    "T": "tests",
    "services": "services",
}
TABLE = {cells[0]: cells for cells in lines(DOCUMENT.read_text())}
ROWS = [pytest.param(cells, id=cells[0]) for cells in TABLE.values()]


def config_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        yield prefix + name
        for annotation in (field.annotation, *get_args(field.annotation)):
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from config_keys(annotation, f"{prefix}{name}.")


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_optimisation_has_one_row() -> None:
    ids = [f"{group}{number}" for group, count in COUNTS.items() for number in range(1, count + 1)]
    assert [cells[0] for cells in lines(DOCUMENT.read_text())] == [*ids, "O"]


@pytest.mark.parametrize("cells", ROWS)
def test_a_row_is_whole(cells: list[str]) -> None:
    _, what, state, where, switch, test, figure = cells
    kind = re.match(r"works|partial|missing|removed", state)
    assert what and kind
    if kind[0] in ("works", "partial"):
        assert where and switch and test and figure


@pytest.mark.parametrize("cells", ROWS)
def test_files_and_tests_are_there(cells: list[str]) -> None:
    for name in [name for name in quoted(cells[3]) + quoted(cells[5]) if "/" in name]:
        folder, _, rest = name.partition("/")
        path, _, function = rest.partition("::")
        file = ROOT / FOLDERS[folder] / path
        assert file.exists(), name
        assert not function or f"def {function}(" in file.read_text(), name
    assert all(name.startswith("T/") for name in quoted(cells[5]))


@pytest.mark.parametrize("cells", ROWS)
def test_switches_are_there(cells: list[str]) -> None:
    keys = set(config_keys(WorkerConfig))
    for name in quoted(cells[4]):
        command, _, seed = name.partition(" ")
        if command == "onoff":
            assert seed in onoff.SEEDS, name
        else:
            assert name in keys | {"forced", "FreezeGc"} or command == "millrace", name


def test_figures_are_of_runs() -> None:
    """What is typed in the last column says why there is none."""
    assert FIGURES.keys() <= TABLE.keys()
    for name, cells in TABLE.items():
        assert name in FIGURES or re.match(r"not measured|with [A-Z]\d+$|none: |$", cells[6]), name
    assert all(seed in TABLE for seed in onoff.SEEDS)


def test_a_run_of_onoff_fills_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = "h200/onoff-test"
    monkeypatch.setattr(figures_seeds, "ONOFF", run)
    assert figures_seeds.onoff("M2") == "not measured: `python -m millrace_bench.onoff M2`"
    path = tmp_path / "bench/results/h200/onoff-test.json"
    path.parent.mkdir(parents=True)
    found = {"seed": "M2", "shape": "T=1", "on_us": 2.5, "off_us": 140.2, "gain": 56.1, "error": 0.0}
    rows = [found, {**found, "shape": "T=16"}, {"seed": "G8", "failed": "RuntimeError"}]
    path.write_text(json.dumps({"results": {"rows": rows}}))
    for module in (figures_seeds, figures_source):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    link = "[onoff-test](bench/results/h200/onoff-test.json)"
    assert figures_seeds.onoff("M2") == f"T=1: 140 → 2.5; T=16: 140 → 2.5 {link}"
    assert figures_seeds.onoff("G8") == "failed when it was measured"
