"""When a prompt's prefix is fetched from another worker, and what that is to the choice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace.v1.worker_pb2 import CacheChange
from millrace_router.config import Policy, Routing
from millrace_router.policy.choose import Chooser, Decision, Situation
from millrace_router.policy.kv_index import HOST_WEIGHT, KvIndex
from millrace_router.policy.loans import MOST_LOAN_S, START_LOAN_S, best_loan, lenders
from millrace_router.policy.scoring import Inputs, cached
from millrace_router.policy.snapshot import Replica, View, Want
from millrace_testing.blocks import blocks

WANT = Want(tokens=1001, page_size=10)  # 100 full pages


def replica(address: str, **fields: object) -> Replica:
    values = {"index": 0, "epoch": f"e-{address}", "fingerprint": "f", "credits": 4, "tokens": 0, "sequences": 0}
    measured = {"page_bytes": 1000, "prompt_tokens_per_s": 1000.0, "read_bytes_per_s": 1e6, "loan_s": 0.01}
    return Replica(address, **(values | measured | fields))


P1, P2 = replica("p1"), replica("p2")
D1 = replica("d1", sources=frozenset({"e-p1", "e-p2"}))
VIEW = View((P1, P2), (D1,))


def decide(
    view: View = VIEW, own: dict[str, int] | None = None, lent: dict[str, int] | None = None, want: Want = WANT
) -> Decision:
    """`own` and `lent`: pages by address."""
    own, lent = own or {}, lent or {}
    lendable = {(f"e-{address}", 0): pages for address, pages in {**own, **lent}.items()}
    chooser = Chooser(Policy.KV_AWARE, Policy.LEAST_LOADED, Routing())
    decision = chooser.choose(Situation(view, want, {}, dict(lendable), {}, lendable))
    assert decision is not None
    return decision


def test_the_answer_comes_back_from_the_decode_worker() -> None:
    decision = decide(own={"p1": 50}, lent={"d1": 90})
    assert decision.placement.prefill == P1 and decision.loan is not None
    assert (decision.loan.lender, decision.loan.num_pages, decision.loan.missing) == (D1, 90, 400)
    assert decision.loan.fetch_s == pytest.approx(0.01 + 40 * 1000 / 1e6)
    assert decision.loan.compute_s == pytest.approx(400 / 1000)
    assert decision.cached_tokens == 900
    assert decision.attributes()["millrace.route.lender"] == "d1/0"


def test_a_fetch_that_takes_longer_is_shown_and_not_done() -> None:
    slow = replica("p1", prompt_tokens_per_s=1e6)
    decision = decide(View((slow,), (D1,)), own={"p1": 50}, lent={"d1": 90})
    assert decision.loan is None and decision.placement.loan is not None and decision.cached_tokens == 500
    assert "millrace.route.lender" not in decision.attributes()


def test_nothing_is_fetched_that_is_there_already() -> None:
    assert decide(own={"p1": 90}, lent={"d1": 90}).placement.loan is None
    assert decide(own={"p1": 100}, lent={"d1": 300}).placement.loan is None  # one token is computed in any case


@pytest.mark.parametrize("change", [{"fingerprint": "other"}, {"left_out": "ejected"}])
def test_who_cannot_lend_is_passed_over(change: dict[str, str]) -> None:
    bad = replica("d0", sources=frozenset({"e-p1"}), **change)
    decision = decide(View((P1,), (bad, D1)), lent={"d0": 95, "d1": 90})
    assert decision.loan is not None and decision.loan.lender == D1


def test_a_replica_lends_to_another_of_its_worker_and_not_to_itself() -> None:
    first, second = replica("p1"), replica("p1", index=1)
    rows = lenders([first, second], {first.process: 40, second.process: 60}, WANT)
    assert [tokens for tokens, _ in rows] == [600, 400]
    found = best_loan(first, 400, WANT, rows)
    assert found is not None and found.lender == second
    assert best_loan(second, 600, WANT, rows) is None


def test_an_idle_worker_that_fetches_is_better_than_a_busy_one_that_has_it() -> None:
    busy = replica("p1", tokens=500)
    decision = decide(View((busy, P2), (D1,)), own={"p1": 90})
    assert decision.placement.prefill == P2 and decision.loan is not None and decision.loan.lender == busy
    unable = replica("p2", prompt_tokens_per_s=1e6)  # fetching is no gain for it
    assert decide(View((busy, unable), (D1,)), own={"p1": 90}).placement.prefill == busy


def test_before_anything_is_measured_pages_of_a_large_model_are_computed() -> None:
    new = {"page_bytes": 4 << 20, "prompt_tokens_per_s": 0.0, "read_bytes_per_s": 0.0, "loan_s": 0.0}
    want = Want(tokens=8001, page_size=64)
    decision = decide(
        View((replica("p1", **new),), (replica("d1", sources=frozenset({"e-p1"}), **new),)), lent={"d1": 120}, want=want
    )
    assert decision.placement.loan is not None and decision.loan is None
    assert decision.placement.loan.fetch_s > START_LOAN_S


def test_a_slow_spell_is_forgotten() -> None:
    found = best_loan(replica("p", loan_s=30.0), 0, WANT, [(1000, D1)])
    assert found is not None and found.fetch_s == pytest.approx(MOST_LOAN_S + 0.1)


@given(
    st.lists(st.tuples(st.integers(0, 120), st.sampled_from(["f", "g"])), max_size=5),
    st.integers(0, 120),
    st.integers(1, 1100),
)
def test_a_loan_has_more_than_the_borrower_and_leaves_a_token(
    rows: list[tuple[int, str]], own: int, tokens: int
) -> None:
    replicas = [replica(f"d{i}", fingerprint=fingerprint) for i, (_, fingerprint) in enumerate(rows)]
    pages = {r.process: count for r, (count, _) in zip(replicas, rows, strict=True) if count}
    want = Want(tokens=tokens, page_size=10)
    found = best_loan(P1, want.cached(own), want, lenders(replicas, pages, want))
    best = max((want.cached(count) for count, fingerprint in rows if fingerprint == "f"), default=0)
    assert (found is None) == (best <= want.cached(own))
    if found is not None:
        assert want.cached(found.num_pages) == found.num_pages * 10 == best < tokens
        assert found.missing == best - want.cached(own) > 0
        assert found.worthwhile == (found.missing * found.fetch_s / found.compute_s < found.missing)


def test_copies_in_a_hosts_memory_count_a_little_less() -> None:
    index, chain = KvIndex(), blocks(*range(1, 9))
    a, b = ("a", 0), ("b", 0)
    index.apply(a, CacheChange(sequence=1, snapshot=True, stored=chain[:4]))
    found = index.lookup(chain)
    assert index.weighted(chain, found) is found
    index.apply(b, CacheChange(sequence=1, snapshot=True, stored=chain[:2], host_stored=chain[:6]))
    index.apply(a, CacheChange(after=1, sequence=2, host_stored=chain[4:5]))
    found = index.lookup(chain)
    assert found == {a: 4, b: 2}  # what they can lend
    assert index.weighted(chain, found) == {a: 4 + HOST_WEIGHT, b: 2 + 4 * HOST_WEIGHT}
    index.apply(b, CacheChange(after=1, sequence=2, removed=chain[:2], host_removed=chain[5:6]))
    found = index.lookup(chain)
    assert index.weighted(chain, found) == {a: 4 + HOST_WEIGHT, b: 5 * HOST_WEIGHT}
    index.forget(a)
    index.forget(b)
    for number in range(200):
        index.apply(("c", 0), CacheChange(after=number, sequence=number + 1, snapshot=not number))
    assert not any(index._host) and len(index) == 0


@given(
    st.lists(
        st.tuples(
            st.integers(0, 130),  # pages on the device
            st.booleans(),  # ejected
            st.sampled_from(["f", "g"]),
            st.sampled_from([0.0, 1.0, 1000.0, 1e6]),
            st.sampled_from([0.0, 1e4, 1e6]),
            st.sampled_from([0.0, 0.01, 5.0]),
        ),
        max_size=8,
    ),
    st.integers(1, 1200),
)
def test_all_candidates_at_once_are_scored_as_one_by_one(
    rows: list[tuple[int, bool, str, float, float, float]], tokens: int
) -> None:
    want = Want(tokens=tokens, page_size=10)
    replicas = [
        replica(
            f"p{i}",
            fingerprint=layout,
            left_out="ejected" if ejected else "",
            tokens=7 * i,
            prompt_tokens_per_s=speed,
            read_bytes_per_s=read,
            loan_s=loan_s,
        )
        for i, (_, ejected, layout, speed, read, loan_s) in enumerate(rows)
    ]
    pages = {r.process: n for r, (n, *_) in zip(replicas, rows, strict=True) if n}
    offers = lenders(replicas, pages, want)
    assert list(offers) == sorted(
        [(want.cached(pages[r.process]), r) for r in replicas if r.process in pages and not r.left_out],
        key=lambda row: -row[0],
    )

    def alone(r: Replica) -> tuple[float, float]:
        own = want.cached(pages.get(r.process, 0))
        loan = best_loan(r, own, want, offers)
        saved: float = own
        if loan is not None and loan.worthwhile:
            saved = own + loan.missing - loan.missing * loan.fetch_s / loan.compute_s
        return r.load + 2.0 * (want.tokens - saved), r.sequences

    inputs = Inputs(want, Routing(cache_weight=2.0), tuple(replicas), pages, None, offers)
    assert list(cached(replicas, inputs)) == [alone(r) for r in replicas]
