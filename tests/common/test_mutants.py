"""The deliberate breaks of `make mutants` still fit the code. Whether tests notice them takes minutes."""

from __future__ import annotations

from millrace_testing.mutants import MUTANTS, lost


def test_every_fragment_is_there_once() -> None:
    assert lost() == []
    assert len({one.name for one in MUTANTS}) == len(MUTANTS) >= 40
    assert all(one.old != one.new and "\n" not in one.old for one in MUTANTS)
