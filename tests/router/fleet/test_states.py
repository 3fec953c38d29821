"""Discovered, healthy, routable: what follows from the workers' states."""

from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st
from millrace_router.fleet.states import DISCOVERED, HEALTHY, ROUTABLE, Pair, count, routable


class Seen(NamedTuple):
    """What the states need of a worker."""

    role_name: str
    epoch: str
    unhealthy: str
    withheld: str


P, D, U = Seen("prefill", "p", "", ""), Seen("decode", "d", "", ""), Seen("unified", "u", "", "")
PD = Pair("p", "d")
seen = st.builds(
    Seen, st.sampled_from(["prefill", "decode"]), st.sampled_from("pqde"), st.sampled_from(["", "x"]), st.just("")
)


def test_a_pair_needs_both_and_a_unified_worker_nobody() -> None:
    assert routable([U], [Pair("", "u")]) == {"u"} and routable([U._replace(withheld="x")], [Pair("", "u")]) == set()
    assert routable([P, D], [PD]) == {"p", "d"}
    assert routable([P, D], []) == set()
    assert routable([P], [PD]) == routable([D], [PD]) == set()
    for change in ({"unhealthy": "lost"}, {"withheld": "draining"}):
        assert routable([P._replace(**change), D], [PD]) == set()
        assert routable([P, D._replace(**change)], [PD]) == set()


def test_states_are_nested() -> None:
    withheld = Seen("decode", "e", "", "not Ready")
    unknown = Seen("unspecified", "", "unreachable", "")
    counts = count([P, D, withheld, unknown], frozenset("pd"))
    assert [counts["decode", state] for state in (DISCOVERED, HEALTHY, ROUTABLE)] == [2, 2, 1]
    assert [counts["unspecified", state] for state in (DISCOVERED, HEALTHY, ROUTABLE)] == [1, 0, 0]


@given(
    st.lists(seen, unique_by=lambda worker: worker.epoch),
    st.sets(st.builds(Pair, st.sampled_from("pq"), st.sampled_from("de"))),
)
def test_whoever_is_routable_has_a_routable_partner(workers: list[Seen], ready: set[Pair]) -> None:
    found = routable(workers, ready)
    healthy = {worker.epoch for worker in workers if not worker.unhealthy}
    assert found <= healthy
    for epoch in found:
        assert any({pair.source, pair.worker} <= found and epoch in (pair.source, pair.worker) for pair in ready)
