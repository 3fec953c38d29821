"""The table of a state machine."""

from __future__ import annotations

import enum

import pytest
from millrace_common.transitions import Transitions


class Light(enum.Enum):
    RED = enum.auto()
    GREEN = enum.auto()
    BROKEN = enum.auto()


LIGHT = Transitions({Light.RED: {Light.GREEN}, Light.GREEN: {Light.RED, Light.BROKEN}, Light.BROKEN: ()})


def test_a_legal_move_is_the_new_state() -> None:
    assert LIGHT.move(Light.RED, Light.GREEN, "a light") is Light.GREEN
    assert LIGHT.final == {Light.BROKEN}


def test_an_illegal_move_names_who_made_it() -> None:
    with pytest.raises(AssertionError, match=r"light 7: illegal transition Light.RED -> Light.BROKEN"):
        LIGHT.move(Light.RED, Light.BROKEN, "light 7")
