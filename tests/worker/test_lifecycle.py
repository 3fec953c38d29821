import itertools

import pytest
from millrace_serve.worker.frontend.lifecycle import Lifecycle, State
from worker.test_frontend import at

WAY = list(State)
BESIDE = {(State.READY, State.DRAINING), (State.PAUSED, State.READY)}


@pytest.mark.parametrize(("state", "to"), itertools.product(State, State))
def test_only_legal_transitions(state: State, to: State) -> None:
    life = at(state)
    follows = WAY.index(to) == WAY.index(state) + 1 or (state, to) in BESIDE
    if follows or (to is State.STOPPED and state is not State.STOPPED):
        life.to(to, "why")
        assert (life.state, life.message) == (to, "why")
    else:
        with pytest.raises(AssertionError):
            life.to(to)
        assert life.state is state


def test_advance_goes_through_every_state_and_never_back() -> None:
    seen: list[State] = []
    life = Lifecycle(seen.append)
    life.advance(State.COMPILING, "rank 0")
    assert seen == [State.LOADING, State.COMPILING]
    life.advance(State.LOADING, "rank 1 is late")
    assert life.state is State.COMPILING and life.message == "rank 1 is late"
