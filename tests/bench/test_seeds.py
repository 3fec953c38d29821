"""docs/seeds.md: every known optimisation has a row, and what a row names is there."""

import re

import pytest
from millrace_bench import config_leaves, onoff
from millrace_bench.figures import environment
from millrace_serve.worker.config import WorkerConfig
from millrace_testing.paths import ROOT

COUNTS = {"G": 14, "M": 12, "A": 13, "X": 9, "P": 7, "S": 3, "T": 4}
FOLDERS = {
    "K": "kernels/millrace_kernels",
    "S": "services/millrace_serve",
    "B": "bench/millrace_bench",
    "T": "tests",
    "services": "services",
    "bench": "bench",
}
LINES = (ROOT / "docs" / "seeds.md").read_text().splitlines()
CELLS = [[cell.strip() for cell in line.strip("|").split("|")] for line in LINES if re.match(r"\| [A-Z]\d* \|", line)]
TABLE = {cells[0]: cells for cells in CELLS}
ROWS = [pytest.param(cells, id=cells[0]) for cells in TABLE.values()]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_optimisation_has_one_row() -> None:
    ids = [f"{group}{number}" for group, count in COUNTS.items() for number in range(1, count + 1)]
    assert [cells[0] for cells in CELLS] == [*ids, "O"]


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
    keys = set(config_leaves.leaves(WorkerConfig))
    for name in quoted(cells[4]):
        command, _, seed = name.partition(" ")
        if command == "onoff":
            assert seed in onoff.SEEDS, name
        else:
            assert name in keys | {"forced", "FreezeGc"} or command == "millrace", name


def test_figures_are_of_runs() -> None:
    """What is typed in the last column says why there is none."""
    lines = environment().get_template("seeds.jinja").render().splitlines()
    measured = {line.partition(":")[0] for line in lines}
    assert measured <= TABLE.keys() and set(onoff.SEEDS) <= TABLE.keys()
    for name, cells in TABLE.items():
        assert name in measured or re.match(r"not measured|with [A-Z]\d+$|none: |$", cells[6]), name
