"""The consistent hash: bounded load, and nobody moves without need."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from millrace_router.config import Routing
from millrace_router.policy.scoring import Inputs, best, session
from millrace_router.policy.snapshot import Key, Replica, Want

SESSIONS = [f"session-{i}" for i in range(60)]
NAMES = st.sets(st.integers(0, 30), min_size=2, max_size=8)


def replicas(names: set[int]) -> list[Replica]:
    return [Replica(f"w{name:02}", 0, "e", "f", credits=9, tokens=0, sequences=0) for name in sorted(names)]


def choose(
    candidates: list[Replica], name: str, load_factor: float = 1.25, last: Key | None = None, load_slack: int = 1
) -> Replica:
    inputs = Inputs(
        Want(10, session=name), Routing(load_factor=load_factor, load_slack=load_slack), tuple(candidates), {}, last
    )
    return candidates[best(candidates, session(candidates, inputs), last)]


@given(NAMES, st.floats(1.01, 3.0), st.lists(st.sampled_from(SESSIONS), min_size=1, max_size=200))
@settings(deadline=None, max_examples=60)
def test_nobody_exceeds_the_bound(names: set[int], factor: float, requests: list[str]) -> None:
    candidates = replicas(names)
    for count, name in enumerate(requests, start=1):
        chosen = choose(candidates, name, factor)
        index = candidates.index(chosen)
        candidates[index] = replace(chosen, sequences=chosen.sequences + 1)
        assert candidates[index].sequences <= math.ceil(factor * count / len(candidates))


@given(NAMES, st.integers(31, 40))
@settings(deadline=None, max_examples=60)
def test_one_that_joins_takes_only_its_own_sessions_and_gives_them_back(names: set[int], newcomer: int) -> None:
    before = {name: choose(replicas(names), name).key for name in SESSIONS}
    after = {name: choose(replicas(names | {newcomer}), name).key for name in SESSIONS}
    moved = {name for name in SESSIONS if before[name] != after[name]}
    assert {after[name] for name in moved} <= {(f"w{newcomer}", 0)}
    leaves = min(names)
    rest = {name: choose(replicas(names - {leaves}), name).key for name in SESSIONS} if len(names) > 1 else before
    assert {name for name in SESSIONS if rest[name] != before[name]} == {
        name for name in SESSIONS if before[name] == (f"w{leaves:02}", 0)
    }


def test_sessions_spread() -> None:
    candidates = replicas(set(range(8)))
    counts = Counter(choose(candidates, f"user {i}").key for i in range(4000))
    assert len(counts) == 8 and min(counts.values()) > 400 and max(counts.values()) < 600


def test_a_session_does_not_depend_on_whose_turn_it_is_and_returns_after_a_rush() -> None:
    candidates = replicas({1, 2, 3})
    home = choose(candidates, "s", last=("w01", 0))
    assert choose(candidates, "s", last=("w02", 0)) == home
    rushed = [replace(r, sequences=10) if r == home else r for r in candidates]
    elsewhere = choose(rushed, "s")
    assert elsewhere.key != home.key
    assert choose(rushed, "s", last=elsewhere.key) == elsewhere, "always the same second choice"
    assert choose(candidates, "s", last=elsewhere.key) == home


def test_few_sequences_are_no_load() -> None:
    candidates = replicas({1, 2, 3})
    home = choose(candidates, "s")
    some = [replace(r, sequences=3) if r == home else r for r in candidates]
    assert choose(some, "s", load_slack=4).key == home.key != choose(some, "s", load_slack=3).key


def test_without_a_session_the_least_loaded() -> None:
    candidates = replicas({1, 2, 3})
    candidates[1] = replace(candidates[1], tokens=0)
    candidates = [replace(r, tokens=100 * (i != 1)) for i, r in enumerate(candidates)]
    assert choose(candidates, "") == candidates[1]
