"""The deliberate breaks of `make mutants` still fit the code. Whether tests notice them takes minutes."""

from millrace_testing.mutants import everything, lost


def test_fragment_of_a_break_is_there_once() -> None:
    found = everything()
    assert lost(found) == []
    assert len({one.name for one in found}) == len(found)
    assert all(one.old != one.new and "\n" not in one.old for one in found)
