"""The legal moves of a state machine."""

from collections.abc import Collection, Mapping
from typing import Generic, TypeVar

S = TypeVar("S")


class Transitions(Generic[S]):
    """`table` maps every state to the states that may follow it; a state that nothing follows is final."""

    def __init__(self, table: Mapping[S, Collection[S]]) -> None:
        self._table = {state: frozenset(successors) for state, successors in table.items()}
        self.final = frozenset(state for state, successors in self._table.items() if not successors)

    def move(self, old: S, new: S, what: object) -> S:
        """`new`, if it may follow `old`; an AssertionError that names `what` otherwise."""
        assert new in self._table[old], f"{what}: illegal transition {old} -> {new}"
        return new
