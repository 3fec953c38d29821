from __future__ import annotations

from collections import Counter

import pytest
from millrace_router.config import Policy
from millrace_router.policy import Chooser, Pair, Replica, Unified, View, Want, pick

WANT = Want(tokens=10)


def replica(address: str, **fields: object) -> Replica:
    values = {"index": 0, "epoch": f"e-{address}", "fingerprint": "f", "credits": 4, "tokens": 0, "sequences": 0}
    return Replica(address, **(values | fields))


def chooser(policy: Policy = Policy.LEAST_LOADED) -> Chooser:
    return Chooser(policy, policy)


P1, P2 = replica("p1"), replica("p2")
D1 = replica("d1", sources=frozenset({"e-p1", "e-p2"}))
D2 = replica("d2", sources=frozenset({"e-p2"}))


def test_nothing_to_choose_from() -> None:
    assert chooser().choose(View(), WANT, {}) is None
    assert chooser().choose(View(prefill=(P1,)), WANT, {}) is None
    assert chooser().choose(View(decode=(D1,)), WANT, {}) is None


def test_only_warmed_pairs() -> None:
    assert chooser().choose(View((P1,), (D2,)), WANT, {}) is None
    assert chooser().choose(View((P1, P2), (D2,)), WANT, {}) == Pair(P2, D2)


def test_equal_fingerprints_only() -> None:
    other = replica("d1", sources=frozenset({"e-p1"}), fingerprint="g")
    assert chooser().choose(View((P1,), (other,)), WANT, {}) is None


@pytest.mark.parametrize("credits", [0, -3])
def test_without_credits_it_waits(credits: int) -> None:
    spent = replica("d1", sources=D1.sources, credits=credits)
    assert chooser().choose(View((P1,), (spent,)), WANT, {}) is None
    assert chooser().choose(View((replica("p1", credits=credits),), (D1,)), WANT, {}) is None


def test_one_token_wants_no_decode_worker() -> None:
    want = Want(tokens=10, prefill_only=True)
    assert chooser().choose(View((P1,), ()), want, {}) == Pair(P1, None)


def test_unified_when_there_is_no_pair() -> None:
    unified = replica("u")
    assert chooser().choose(View((), (), (unified,)), WANT, {}) == Unified(unified)
    assert chooser().choose(View((P1,), (D1,), (unified,)), WANT, {}) == Pair(P1, D1)


def test_avoided_workers_are_the_last_resort() -> None:
    view = View((P1, P2), (D1,))
    assert chooser().choose(view, Want(10, avoid=frozenset({"p1"})), {}) == Pair(P2, D1)
    assert chooser().choose(view, Want(10, avoid=frozenset({"p2"})), {}) == Pair(P1, D1)
    assert chooser().choose(View((P1,), (D1,)), Want(10, avoid=frozenset({"p1", "d1"})), {}) == Pair(P1, D1)


def test_least_loaded_by_tokens_then_sequences() -> None:
    candidates = [replica("a", tokens=9), replica("b", tokens=5, sequences=3), replica("c", tokens=5, sequences=2)]
    assert pick(Policy.LEAST_LOADED, candidates, None).address == "c"


def test_ties_go_round() -> None:
    candidates, last, seen = [replica("a"), replica("b"), replica("c", index=1), replica("c")], None, []
    for _ in range(8):
        last = pick(Policy.LEAST_LOADED, candidates, last).key
        seen.append(last)
    assert seen[:4] == [("a", 0), ("b", 0), ("c", 0), ("c", 1)] == seen[4:]


def test_round_robin_is_fair_while_candidates_come_and_go() -> None:
    everyone = [replica(name, tokens=tokens) for name, tokens in (("a", 0), ("b", 100), ("c", 50))]
    last, seen = None, Counter()
    for turn in range(30):
        candidates = everyone if turn % 5 else everyone[:2]
        last = pick(Policy.ROUND_ROBIN, candidates, last).key
        seen[last[0]] += 1
    assert max(seen.values()) - min(seen.values()) <= 6
