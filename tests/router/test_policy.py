"""Who is chosen: credits, layouts and pairing first, then each policy."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_router.config import Policy, RouterConfig, Routing
from millrace_router.policy.choose import Chooser, Situation
from millrace_router.policy.scoring import SCORERS, Inputs, best
from millrace_router.policy.snapshot import Placement, Replica, View, Want
from pydantic import ValidationError

WANT = Want(tokens=10)
COLD: dict = {}


def replica(address: str, **fields: object) -> Replica:
    values = {"index": 0, "epoch": f"e-{address}", "fingerprint": "f", "credits": 4, "tokens": 0, "sequences": 0}
    return Replica(address, **(values | fields))


def choose(view: View, want: Want = WANT, policy: Policy = Policy.LEAST_LOADED, **routing: object) -> Placement | None:
    decision = Chooser(policy, policy, Routing(**routing)).choose(Situation(view, want))
    return None if decision is None else decision.placement


def pick(
    policy: Policy, candidates: list[Replica], want: Want = WANT, last: object = None, **fields: object
) -> Replica:
    pages = fields.pop("pages", COLD)
    candidates = sorted(candidates, key=lambda r: r.key)
    scores = SCORERS[policy](candidates, Inputs(want, Routing(**fields), tuple(candidates), pages, last))
    return candidates[best(candidates, scores, last)]


P1, P2 = replica("p1"), replica("p2")
D1 = replica("d1", sources=frozenset({"e-p1", "e-p2"}))
D2 = replica("d2", sources=frozenset({"e-p2"}))


def test_nothing_to_choose_from() -> None:
    assert choose(View()) is None
    assert choose(View(prefill=(P1,))) is None
    assert choose(View(decode=(D1,))) is None


def test_only_warmed_pairs() -> None:
    assert choose(View((P1,), (D2,))) is None
    assert choose(View((P1, P2), (D2,))) == Placement(P2, D2)


def test_equal_fingerprints_only() -> None:
    other = replica("d1", sources=frozenset({"e-p1"}), fingerprint="g")
    assert choose(View((P1,), (other,))) is None


@pytest.mark.parametrize("credits", [0, -3])
def test_without_credits_it_waits(credits: int) -> None:
    spent = replica("d1", sources=D1.sources, credits=credits)
    assert choose(View((P1,), (spent,))) is None
    assert choose(View((replica("p1", credits=credits),), (D1,))) is None


def test_one_token_wants_no_decode_worker() -> None:
    want = Want(tokens=10, outputs=1)
    assert choose(View((P1,), ()), want) == Placement(P1, None)


def test_unified_when_there_is_no_pair() -> None:
    unified = replica("u")
    assert choose(View((), (), (unified,))) == Placement(None, unified)
    assert choose(View((P1,), (D1,), (unified,))) == Placement(P1, D1)


def test_avoided_workers_are_the_last_resort() -> None:
    view = View((P1, P2), (D1,))
    assert choose(view, Want(10, avoid=frozenset({"p1"}))) == Placement(P2, D1)
    assert choose(view, Want(10, avoid=frozenset({"p2"}))) == Placement(P1, D1)
    assert choose(View((P1,), (D1,)), Want(10, avoid=frozenset({"p1", "d1"}))) == Placement(P1, D1)


@st.composite
def views(draw: st.DrawFn) -> View:
    def replicas(prefix: str, sources: bool) -> tuple[Replica, ...]:
        return tuple(
            replica(
                f"{prefix}{i}",
                credits=draw(st.integers(-1, 2)),
                tokens=draw(st.integers(0, 5000)),
                sequences=draw(st.integers(0, 9)),
                fingerprint=draw(st.sampled_from("fg")),
                sources=draw(st.frozensets(st.sampled_from(["e-p0", "e-p1", "e-p2"]))) if sources else frozenset(),
                labels=draw(st.dictionaries(st.sampled_from(["zone", "host"]), st.sampled_from("ab"))),
            )
            for i in range(draw(st.integers(0, 3)))
        )

    return View(replicas("p", False), replicas("d", True), replicas("u", False))


@given(
    views(),
    st.sampled_from(list(Policy)),
    st.sampled_from(list(Policy)),
    st.booleans(),
    st.frozensets(st.sampled_from(["p0", "p1", "d0", "u0"])),
    st.integers(0, 2**64 - 1),
    st.sampled_from([{}, {"local_prefill_tokens": 500}, {"local_prefill_wait": 1e-9}]),
)
def test_whatever_the_policy_nobody_without_credits_and_no_unequal_layouts(
    view: View, prefill: Policy, decode: Policy, one: bool, avoid: frozenset[str], draw: int, local: dict[str, float]
) -> None:
    want = Want(100, outputs=1 if one else 2, avoid=avoid, draw=draw, session=f"s{draw % 3}")
    chooser = Chooser(prefill, decode, Routing(**local))
    situation = Situation(view, want)
    decision = chooser.choose(situation)
    placement = None if decision is None else decision.placement
    possible = {
        (p.key, d.key)
        for p in view.prefill
        for d in view.decode
        if min(p.credits, d.credits) > 0 and p.epoch in d.sources and p.fingerprint == d.fingerprint
    }
    match placement:
        case Placement(p, None):
            assert one and p is not None and p.credits > 0
        case Placement(None, worker):
            assert worker.credits > 0
            short = 100 + worker.tokens < local.get("local_prefill_tokens", 0)
            spared = "local_prefill_wait" in local and view.prefill
            assert worker in view.unified or (not one and (short or spared))
        case Placement(p, d):
            assert (p.key, d.key) in possible and not one
        case None:
            assert not possible or one
            assert not any(u.credits > 0 for u in view.unified)
    assert chooser.choose(situation) == decision, "the same situation, the same choice"
    if decision is not None:
        last = decision.explain()[-1]
        chosen = decision.placement.decode or decision.placement.prefill
        rows = [(row.address, row.replica) for row in last.candidates if row.chosen]
        assert chosen is not None and rows == [chosen.key]
        assert all(bool(row.excluded) != bool(row.score) for row in last.candidates)


# ------------------------------------------------------------------------------------- the policies


def test_least_loaded_by_tokens_then_sequences() -> None:
    candidates = [replica("a", tokens=9), replica("b", tokens=5, sequences=3), replica("c", tokens=5, sequences=2)]
    assert pick(Policy.LEAST_LOADED, candidates).address == "c"


def test_kv_that_is_read_in_each_step_is_load() -> None:
    assert pick(Policy.LEAST_LOADED, [replica("a", held=9000), replica("b", held=50, sequences=40)]).address == "b"


def test_ties_go_round() -> None:
    candidates, last, seen = [replica("a"), replica("b"), replica("c", index=1), replica("c")], None, []
    for _ in range(8):
        last = pick(Policy.LEAST_LOADED, candidates, last=last).key
        seen.append(last)
    assert seen[:4] == [("a", 0), ("b", 0), ("c", 0), ("c", 1)] == seen[4:]


def test_round_robin_is_fair_while_candidates_come_and_go() -> None:
    everyone = [replica(name, tokens=tokens) for name, tokens in (("a", 0), ("b", 100), ("c", 50))]
    last, seen = None, Counter()
    for turn in range(30):
        candidates = everyone if turn % 5 else everyone[:2]
        last = pick(Policy.ROUND_ROBIN, candidates, last=last).key
        seen[last[0]] += 1
    assert max(seen.values()) - min(seen.values()) <= 6


def test_random_reaches_everybody_alike() -> None:
    everyone = [replica(name, tokens=1000 * i) for i, name in enumerate("abcd")]
    seen = Counter(pick(Policy.RANDOM, everyone, Want(1, draw=draw)).address for draw in range(400))
    assert set(seen.values()) == {100}


@given(st.integers(0, 2**64 - 1), st.integers(1, 9))
def test_power_of_two_takes_the_better_of_two_different_ones(draw: int, count: int) -> None:
    everyone = [replica(str(i), tokens=i) for i in range(count)]
    inputs = Inputs(Want(1, draw=draw), Routing(), tuple(everyone), COLD, None)
    drawn = [i for i, score in enumerate(SCORERS[Policy.POWER_OF_TWO](everyone, inputs)) if score[0] < float("inf")]
    assert len(drawn) == min(count, 2)
    assert pick(Policy.POWER_OF_TWO, everyone, Want(1, draw=draw)).tokens == min(drawn)


@pytest.mark.parametrize("policy", [Policy.PREFIX_AWARE, Policy.KV_AWARE])
def test_a_cached_prefix_is_worth_its_tokens(policy: Policy) -> None:
    want = Want(tokens=1000, page_size=64)
    warm = {("e-a", 0): 10}  # 640 tokens
    assert pick(policy, [replica("a", tokens=600), replica("b")], want, pages=warm).address == "a"
    assert pick(policy, [replica("a", tokens=700), replica("b")], want, pages=warm).address == "b"
    assert pick(policy, [replica("a", tokens=700), replica("b")], want, pages=warm, cache_weight=2.0).address == "a"


def test_a_whole_prompt_in_the_cache_still_leaves_a_token_to_compute() -> None:
    assert Want(tokens=128, page_size=64).cached(2) == 64
    assert Want(tokens=129, page_size=64).cached(2) == 128
    assert Want(tokens=1).cached(5) == 0


def test_length_buckets_by_label() -> None:
    bounds = {"length_bounds": (100, 1000), "length_label": "size"}
    everyone = [replica(name, labels={"size": str(i)}) for i, name in enumerate("abc")]
    found = [pick(Policy.LENGTH_BUCKETS, everyone, Want(n), **bounds).address for n in (1, 100, 101, 1000, 1001)]
    assert found == ["a", "a", "b", "b", "c"]
    assert pick(Policy.LENGTH_BUCKETS, everyone[:2], Want(5000), **bounds).address == "b"  # the nearest
    strange = [replica("x", labels={"size": "big"}), replica("y"), everyone[0]]
    assert pick(Policy.LENGTH_BUCKETS, strange, Want(5000), **bounds).address == "a"
    assert pick(Policy.LENGTH_BUCKETS, strange[:2], Want(5000), **bounds).address == "x"


def test_length_buckets_by_rank_count_everybody_of_the_role() -> None:
    everyone = tuple(replica(f"p{i}") for i in range(6))
    decode = replica("d", sources=frozenset(p.epoch for p in everyone))
    chooser = Chooser(Policy.LENGTH_BUCKETS, Policy.ROUND_ROBIN, Routing(length_bounds=(100, 1000)))

    def prefill(tokens: int, *busy: int) -> str:
        view = View(tuple(replica(p.address, credits=0) if i in busy else p for i, p in enumerate(everyone)), (decode,))
        decision = chooser.choose(Situation(view, Want(tokens)))
        assert decision is not None and decision.placement.prefill is not None
        return decision.placement.prefill.address

    assert [prefill(tokens) for tokens in (50, 500, 5000)] == ["p0", "p2", "p4"]
    assert prefill(500, 2) == "p3"
    assert prefill(5000, 4, 5) == "p2"  # the nearest bucket


def test_bounds_must_ascend() -> None:
    with pytest.raises(ValidationError, match="ascending"):
        Routing(length_bounds=(5, 5))
    with pytest.raises(ValidationError):
        RouterConfig(model="m", prefill_policy="fastest")


# ------------------------------------------------------------------------------------- near is better


def near(address: str, zone: str, host: str, **fields: object) -> Replica:
    labels = {"zone": zone, "host": host}
    return replica(address, sources=frozenset({"e-p"}), labels=labels, **fields)


def decode_for(*decodes: Replica, policy: Policy = Policy.LEAST_LOADED, **labels: str) -> str:
    placement = choose(View((replica("p", labels=labels),), decodes), policy=policy)
    assert placement is not None and placement.prefill is not None and placement.decode is not None
    return placement.decode.address


def test_the_nearest_decode_worker_with_room() -> None:
    decodes = near("d1", "z2", "h9"), near("d2", "z1", "h2", tokens=500), near("d3", "z1", "h1", tokens=900)
    assert decode_for(*decodes, zone="z1", host="h1") == "d3"
    assert decode_for(*decodes, zone="z1", host="h5") == "d2"
    assert decode_for(*decodes, zone="z3", host="h1") == "d1"  # equally far: the least loaded
    assert decode_for(*decodes) == "d1"


def test_nearness_costs_no_more_than_the_load_bound() -> None:
    full = near("d1", "z1", "h1", sequences=20)
    assert decode_for(full, near("d2", "z1", "h2"), near("d3", "z2", "h3"), zone="z1", host="h1") == "d2"
    assert decode_for(full, near("d3", "z2", "h3", sequences=18), zone="z1", host="h1") == "d1"


# ------------------------------------------------------------------------------------- local prefill


def local(decode: Replica, tokens: int, pages: int = 0) -> bool:
    chooser = Chooser(Policy.LEAST_LOADED, Policy.LEAST_LOADED, Routing(local_prefill_tokens=256))
    situation = Situation(View((P1,), (decode,)), Want(tokens), decode_pages={decode.process: pages})
    decision = chooser.choose(situation)
    assert decision is not None
    assert decision.way == ("local" if decision.placement.prefill is None else "pair")
    return decision.placement.prefill is None


def test_a_short_uncached_prompt_is_run_by_the_decode_worker() -> None:
    assert local(D1, 255)
    assert not local(D1, 256)
    assert local(D1, 1000, pages=12)  # 768 tokens are there
    assert not local(D1, 1000, pages=11)


def test_a_decode_worker_that_is_busy_with_prompts_gets_no_more() -> None:
    assert not local(replica("d1", sources=D1.sources, tokens=200), 60)
    assert local(replica("d1", sources=D1.sources, tokens=190), 60)


def test_a_prompt_without_room_waits_elsewhere_than_on_the_decode_worker() -> None:
    def full(room: int) -> Replica:
        return replica("d1", sources=D1.sources, room=room)

    assert local(full(200), 200)
    assert choose(View((P1,), (full(199),)), Want(200), local_prefill_tokens=256) is None
    assert local(full(1000 - 12 * 64), 1000, pages=12), "the others are there"


# ------------------------------------------------------------------------------------- room


@pytest.mark.parametrize("role", ["decode", "unified"])
def test_a_request_waits_until_there_is_room_for_its_expected_output(role: str) -> None:
    def chosen(want: Want, **fields: int) -> bool:
        worker = replica("d1", sources=D1.sources, **fields)
        view = View((P1,), (worker,)) if role == "decode" else View((), (), (worker,))
        return choose(view, want) is not None

    assert chosen(Want(300, outputs=1200), room=900, expected_output=600)
    assert not chosen(Want(300, outputs=1200), room=899, expected_output=600)
    assert chosen(Want(300, outputs=51), room=350, expected_output=600), "max_tokens is the bound"
    assert not chosen(Want(300, outputs=1200), room=-5)
    assert choose(View((P1,), (replica("d1", sources=D1.sources, room=-5),)), Want(300, outputs=1)) is not None


def test_a_prefill_worker_takes_a_prompt_of_any_length_until_its_queue_is_long() -> None:
    assert choose(View((replica("p1", room=1),), (D1,)), Want(100_000)) is not None
    assert choose(View((replica("p1", room=0),), (D1,))) is None


def test_room_is_kept_for_an_earlier_request() -> None:
    small = replica("d1", sources=D1.sources, room=900, context=1000)
    roomy, tight = (replica(f"d{i}", sources=D1.sources, room=room) for i, room in ((2, 500), (3, 400)))
    view = View((P1,), (small, roomy, tight))
    assert view.roomiest(Want(800, outputs=300)) == "d2", "the largest room of those that are large enough"
    assert view.roomiest(Want(10, outputs=9)) == "d1"
    assert View((P1,), (small,)).roomiest(Want(800, outputs=300)) == ""
    assert choose(View((P1,), (roomy,)), Want(10, kept="d2")) is None
    assert choose(View((P1,), (roomy, tight)), Want(10, kept="d2")).decode == tight


def test_workers_that_are_too_small_are_passed_over() -> None:
    def context(name: str, tokens: int) -> Replica:
        return replica(name, sources=D1.sources, context=tokens)

    small, large = context("d1", 712), context("d2", 4096)
    assert choose(View((P1,), (small, large)), Want(300, outputs=413)).decode == large
    assert choose(View((P1,), (small,)), Want(300, outputs=413)) is None
    assert choose(View((P1,), (small,)), Want(300, outputs=412)).decode == small
    assert (
        choose(View((context("p1", 300), context("p2", 301)), (large,)), Want(300, outputs=9)).prefill.address == "p2"
    )
    assert choose(View((), (), (context("u1", 309), context("u2", 308))), Want(300, outputs=9)).decode.address == "u1"


def test_one_token_is_not_run_by_a_decode_worker() -> None:
    for option in ({"local_prefill_tokens": 256}, {"local_prefill_wait": 1e-9}):
        assert choose(View((BUSY,), (D1,)), Want(10, outputs=1), **option) == Placement(BUSY, None)


BUSY = replica("p1", tokens=10_001, prompt_tokens_per_s=20_000)  # half a second, and a token


def sooner(prefill: tuple[Replica, ...], decode: Replica = D1, wait: float = 0.5, cached: int = 0) -> bool:
    """Whether the decode worker runs a prompt of 1,000 tokens; `cached` pages of it are at the first prefill worker."""
    chooser = Chooser(Policy.LEAST_LOADED, Policy.LEAST_LOADED, Routing(local_prefill_wait=wait))
    pages = {prefill[0].process: cached} if prefill else {}
    decision = chooser.choose(Situation(View(prefill, (decode,)), Want(1000), prefill_pages=pages))
    return decision is not None and decision.way == "local"


def test_a_prompt_that_would_wait_for_long_is_run_by_a_decode_worker() -> None:
    assert sooner((BUSY,))
    assert not sooner((BUSY,), wait=0.0) and not sooner((BUSY,), wait=0.51)
    assert not sooner((BUSY, P2)), "the other prefill worker has nothing to do"
    assert not sooner((replica("p1", tokens=10_000, prompt_tokens_per_s=20_000),))
    assert not sooner((replica("p1", tokens=25_000),)) and sooner((replica("p1", tokens=25_001),))  # not measured yet


def test_only_a_decode_worker_that_is_sooner_done_runs_it() -> None:
    def busy(tokens: int, **fields: object) -> Replica:
        return replica("d1", sources=D1.sources, tokens=tokens, **fields)

    assert sooner((BUSY,), busy(10_000)) and not sooner((BUSY,), busy(10_001))
    there = 13 * 64  # tokens, at the prefill worker
    assert sooner((BUSY,), busy(10_000 - there), cached=13) and not sooner((BUSY,), busy(10_001 - there), cached=13)
    assert not sooner((BUSY,), busy(0, credits=0))


def test_prefill_workers_without_credits_are_waited_for_until_a_decode_worker_is_free() -> None:
    closed = replica("p1", credits=0)
    assert sooner((closed,)) and not sooner((closed,), wait=0.0)
    assert not sooner(()), "without any prefill worker there is no pair, and nothing was warmed"
    newer = replica("d1", sources=D1.sources, revision="b")
    assert choose(View((BUSY,), (newer,), first="b"), local_prefill_wait=0.6) == Placement(BUSY, newer)
