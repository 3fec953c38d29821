"""The deliberate breaks of `make mutants` still fit the code. Whether tests notice them takes minutes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from millrace_testing import mutants
from millrace_testing.mutants import MUTANTS, lost, of, survives


def test_every_fragment_is_there_once() -> None:
    assert lost() == []
    assert len({one.name for one in MUTANTS}) == len(MUTANTS) >= 40
    assert all(one.old != one.new and "\n" not in one.old for one in MUTANTS)


@pytest.mark.parametrize(
    ("code", "outcome"), [(0, mutants.SURVIVED), (1, mutants.KILLED), (-6, mutants.KILLED), (None, mutants.KILLED)]
)
def test_outcomes_and_a_tree_that_is_whole_again(
    code: int | None, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in of pytest: its exit code; None: it hangs."""
    seen: list[str] = []

    def run(command: list[str], *, cwd: Path, timeout: float, **_: object) -> subprocess.CompletedProcess[str]:
        seen.append((cwd / "code.py").read_text() + command[-1])
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, code, "", "")

    monkeypatch.setattr(mutants.subprocess, "run", run)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_one.py").touch()
    (tmp_path / "code.py").write_text("A = 1\nB = 1\n")
    assert survives(of("one", "code.py", "B = 1", "B = 2", "test_one.py"), tmp_path) == outcome
    assert seen == ["A = 1\nB = 2\ntests/test_one.py"] and (tmp_path / "code.py").read_text() == "A = 1\nB = 1\n"
    assert survives(of("twice", "code.py", "= 1", "= 2", "test_one.py"), tmp_path) == mutants.GONE
    assert lost((of("untested", "code.py", "A = 1", "", "test_two.py"),), tmp_path) == ["untested"]


def test_tests_that_cannot_be_collected_are_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        mutants.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 2, "no such module", "")
    )
    (tmp_path / "tests").mkdir()
    (tmp_path / "code.py").write_text("A = 1\n")
    with pytest.raises(RuntimeError, match="no such module"):
        survives(of("one", "code.py", "A = 1", "A =", ""), tmp_path)
    assert (tmp_path / "code.py").read_text() == "A = 1\n"
