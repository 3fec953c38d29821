"""Who is chosen: capacity, layouts and pairing first, then each policy, and the consistent hash of sessions."""

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.split import Slo
from millrace_common.step_times import StepTimes
from millrace_router.config import Policy, Routing
from millrace_router.policy.choose import Chooser, Situation
from millrace_router.policy.scoring import LOAD_SLACK, SCORERS, Inputs, best, session
from millrace_router.policy.snapshot import NOT_MEASURED, Key, Placement, PlacementRequest, Replica, View
from millrace_testing.examples import examples

WANT = PlacementRequest(tokens=10)
COLD: dict = {}


def replica(address: str, **fields: object) -> Replica:
    values = {"index": 0, "epoch": f"e-{address}", "fingerprint": "f", "capacity": 4, "tokens": 0, "sequences": 0}
    return Replica(address, **(values | fields))


def choose(
    view: View, want: PlacementRequest = WANT, policy: Policy = Policy.LEAST_LOADED, **routing: object
) -> Placement | None:
    decision = Chooser(policy, policy, Routing(**routing)).choose(Situation(view, want))
    return None if decision is None else decision.placement


def pick(
    policy: Policy, candidates: list[Replica], want: PlacementRequest = WANT, last: object = None, **fields: object
) -> Replica:
    pages = fields.pop("pages", COLD)
    candidates = sorted(candidates, key=lambda r: r.key)
    scores = SCORERS[policy](candidates, Inputs(want, Routing(**fields), tuple(candidates), pages, last))
    return candidates[best(candidates, scores, last)]


P1, P2 = replica("p1"), replica("p2")
D1 = replica("d1", sources=frozenset({"e-p1", "e-p2"}))


def test_unified_when_there_is_no_pair() -> None:
    unified = replica("u")
    assert choose(View((), (), (unified,))) == Placement(None, unified)
    assert choose(View((P1,), (D1,), (unified,))) == Placement(P1, D1)


def test_avoided_workers_are_the_last_resort() -> None:
    view = View((P1, P2), (D1,))
    assert choose(view, PlacementRequest(10, avoid=frozenset({"p1"}))) == Placement(P2, D1)
    assert choose(view, PlacementRequest(10, avoid=frozenset({"p2"}))) == Placement(P1, D1)
    assert choose(View((P1,), (D1,)), PlacementRequest(10, avoid=frozenset({"p1", "d1"}))) == Placement(P1, D1)


@st.composite
def views(draw: st.DrawFn) -> View:
    def replicas(prefix: str, sources: bool) -> tuple[Replica, ...]:
        return tuple(
            replica(
                f"{prefix}{i}",
                capacity=draw(st.integers(-1, 2)),
                tokens=draw(st.integers(0, 5000)),
                sequences=draw(st.integers(0, 9)),
                fingerprint=draw(st.sampled_from("fg")),
                sources=draw(st.frozensets(st.sampled_from(["e-p0", "e-p1", "e-p2"]))) if sources else frozenset(),
                labels=draw(st.dictionaries(st.sampled_from(["zone", "host"]), st.sampled_from("ab"))),
                times=draw(st.sampled_from([NOT_MEASURED, StepTimes(0.01, 1e-4, 1e-8, 0.01, 1e-5, 1e-9)])),
                streams=draw(st.integers(0, 9)),
                flexible=draw(st.booleans()),
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
    st.sampled_from([Slo(), Slo(1.0, 0.04), Slo(ttft_s=0.02), Slo(tpot_s=0.001)]),
)
def test_whatever_the_policy_nobody_without_capacity_and_no_unequal_layouts(
    view: View, prefill: Policy, decode: Policy, one: bool, avoid: frozenset[str], draw: int, slo: Slo
) -> None:
    want = PlacementRequest(100, outputs=1 if one else 2, slo=slo, avoid=avoid, draw=draw, session=f"s{draw % 3}")
    chooser = Chooser(prefill, decode, Routing())
    situation = Situation(view, want)
    decision = chooser.choose(situation)
    placement = None if decision is None else decision.placement
    possible = {
        (p.key, d.key)
        for p in view.prefill
        for d in view.decode
        if min(p.capacity, d.capacity) > 0 and p.epoch in d.sources and p.fingerprint == d.fingerprint
    }
    match placement:
        case Placement(p, None):
            assert one and p is not None and p.capacity > 0
        case Placement(None, worker):
            assert worker.capacity > 0
            assert worker in view.unified or worker.flexible or (slo.limited and worker in view.decode)
        case Placement(p, d):
            assert (p.key, d.key) in possible and not one
        case None:
            assert not possible or one
            assert not any(u.capacity > 0 for u in view.unified)
            assert not any(r.capacity > 0 and r.flexible for r in (*view.prefill, *view.decode))
    assert chooser.choose(situation) == decision, "the same situation, the same choice"
    if decision is not None:
        chosen = decision.placement.decode or decision.placement.prefill
        rows = [row for selection in decision.explain() for row in selection.candidates]
        assert chosen is not None and chosen.key in {(row.address, row.replica) for row in rows if row.chosen}
        assert all(bool(row.excluded) != bool(row.score) for row in rows)


# ------------------------------------------------------------------------------------- the policies


def test_least_loaded_by_tokens_then_sequences() -> None:
    candidates = [replica("a", tokens=9), replica("b", tokens=5, sequences=3), replica("c", tokens=5, sequences=2)]
    assert pick(Policy.LEAST_LOADED, candidates).address == "c"
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
    seen = Counter(pick(Policy.RANDOM, everyone, PlacementRequest(1, draw=draw)).address for draw in range(400))
    assert set(seen.values()) == {100}


@given(st.integers(0, 2**64 - 1), st.integers(1, 9))
def test_power_of_two_takes_the_better_of_two_different_ones(draw: int, count: int) -> None:
    everyone = [replica(str(i), tokens=i) for i in range(count)]
    inputs = Inputs(PlacementRequest(1, draw=draw), Routing(), tuple(everyone), COLD, None)
    drawn = [i for i, score in enumerate(SCORERS[Policy.POWER_OF_TWO](everyone, inputs)) if score[0] < float("inf")]
    assert len(drawn) == min(count, 2)
    assert pick(Policy.POWER_OF_TWO, everyone, PlacementRequest(1, draw=draw)).tokens == min(drawn)


@pytest.mark.parametrize("policy", [Policy.PREFIX_AWARE, Policy.KV_AWARE])
def test_a_cached_prefix_is_worth_its_tokens(policy: Policy) -> None:
    want = PlacementRequest(tokens=1000, page_size=64)
    warm = {("e-a", 0): 10}  # 640 tokens
    assert pick(policy, [replica("a", tokens=600), replica("b")], want, pages=warm).address == "a"
    assert pick(policy, [replica("a", tokens=700), replica("b")], want, pages=warm).address == "b"
    assert pick(policy, [replica("a", tokens=700), replica("b")], want, pages=warm, cache_weight=2.0).address == "a"


def test_length_buckets_by_label() -> None:
    bounds = {"length_bounds": (100, 1000), "length_label": "size"}
    everyone = [replica(name, labels={"size": str(i)}) for i, name in enumerate("abc")]
    found = [
        pick(Policy.LENGTH_BUCKETS, everyone, PlacementRequest(n), **bounds).address for n in (1, 100, 101, 1000, 1001)
    ]
    assert found == ["a", "a", "b", "b", "c"]
    assert pick(Policy.LENGTH_BUCKETS, everyone[:2], PlacementRequest(5000), **bounds).address == "b"  # the nearest
    strange = [replica("x", labels={"size": "big"}), replica("y"), everyone[0]]
    assert pick(Policy.LENGTH_BUCKETS, strange, PlacementRequest(5000), **bounds).address == "a"
    assert pick(Policy.LENGTH_BUCKETS, strange[:2], PlacementRequest(5000), **bounds).address == "x"


def test_length_buckets_by_rank_count_everybody_of_the_role() -> None:
    everyone = tuple(replica(f"p{i}") for i in range(6))
    decode = replica("d", sources=frozenset(p.epoch for p in everyone))
    chooser = Chooser(Policy.LENGTH_BUCKETS, Policy.ROUND_ROBIN, Routing(length_bounds=(100, 1000)))

    def prefill(tokens: int, *busy: int) -> str:
        view = View(
            tuple(replica(p.address, capacity=0) if i in busy else p for i, p in enumerate(everyone)), (decode,)
        )
        decision = chooser.choose(Situation(view, PlacementRequest(tokens)))
        assert decision is not None and decision.placement.prefill is not None
        return decision.placement.prefill.address

    assert [prefill(tokens) for tokens in (50, 500, 5000)] == ["p0", "p2", "p4"]
    assert prefill(500, 2) == "p3"
    assert prefill(5000, 4, 5) == "p2"  # the nearest bucket


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
    beside = near("d2", "z1", "h1", tokens=500)
    assert decode_for(full, beside, near("d3", "z2", "h3"), zone="z1", host="h1") == "d2"


# ------------------------------------------------------------------------------------- room and contexts


def decode(**fields: object) -> Replica:
    return replica("d1", sources=D1.sources, **fields)


@pytest.mark.parametrize("policy", Policy)
def test_a_full_batch_is_left_unless_it_has_the_prompt(policy: Policy) -> None:
    full, free = replica("a", free_slots=0), replica("b", free_slots=1, tokens=50, sequences=3)
    sources = D1.sources
    for view in (
        View((), (), (full, free)),
        View((P1,), (replace(full, sources=sources), replace(free, sources=sources))),
    ):
        chosen = {
            choose(view, PlacementRequest(5000, draw=i, session=f"s{i}"), policy).decode.address for i in range(9)
        }
        assert chosen == ({"a", "b"} if policy is Policy.SESSION else {"b"}), "a session waits for its own replica"
    assert choose(View((), (), (full,)), policy=policy).decode == full, "nobody else"
    for pages, address in ((31, "b"), (33, "a")):  # 2,048 tokens are a chunk
        cached = Situation(View((), (), (full, free)), PlacementRequest(5000), decode_pages={full.process: pages})
        assert Chooser(policy, Policy.PREFIX_AWARE, Routing()).choose(cached).placement.decode.address == address


@pytest.mark.parametrize("role", ["decode", "unified"])
@pytest.mark.parametrize(
    ("want", "fields", "chosen"),
    [
        (PlacementRequest(300, outputs=1200), {"room": 900, "expected_output": 600}, True),
        (PlacementRequest(300, outputs=1200), {"room": 899, "expected_output": 600}, False),
        (PlacementRequest(300, outputs=51), {"room": 350, "expected_output": 600}, True),  # max_tokens is the bound
        (PlacementRequest(300, outputs=1200), {"room": -5}, False),
        (PlacementRequest(300, outputs=412), {"context": 712}, True),
        (PlacementRequest(300, outputs=413), {"context": 712}, False),
    ],
)
def test_a_request_waits_until_its_expected_output_has_room(
    role: str, want: PlacementRequest, fields: dict[str, int], chosen: bool
) -> None:
    worker = decode(**fields)
    view = View((P1,), (worker,)) if role == "decode" else View((), (), (worker,))
    assert (choose(view, want) is not None) is chosen


def test_a_prefill_worker_takes_what_fits_until_its_queue_is_long() -> None:
    assert choose(View((replica("p1", room=1),), (D1,)), PlacementRequest(100_000)) is not None
    assert choose(View((replica("p1", room=0),), (D1,))) is None
    assert choose(View((P1,), (decode(room=-5),)), PlacementRequest(300, outputs=1)) == Placement(P1, None)
    small, large = replica("p1", context=300), replica("p2", context=301)
    assert choose(View((small, large), (D1,)), PlacementRequest(300, outputs=9)).prefill == large


def test_room_is_kept_for_an_earlier_request() -> None:
    small = decode(room=900, context=1000)
    roomy, tight = (replica(f"d{i}", sources=D1.sources, room=room) for i, room in ((2, 500), (3, 400)))
    view = View((P1,), (small, roomy, tight))
    assert view.roomiest(PlacementRequest(800, outputs=300)) == "d2", "the largest room of those that are large enough"
    assert view.roomiest(PlacementRequest(10, outputs=9)) == "d1"
    assert View((P1,), (small,)).roomiest(PlacementRequest(800, outputs=300)) == ""
    assert choose(View((P1,), (roomy,)), PlacementRequest(10, kept="d2")) is None
    assert choose(View((P1,), (roomy, tight)), PlacementRequest(10, kept="d2")).decode == tight


# ------------------------------------------------------------------------------------- sessions


SESSIONS = [f"session-{i}" for i in range(60)]
NAMES = st.sets(st.integers(0, 30), min_size=2, max_size=8)


def replicas(names: set[int]) -> list[Replica]:
    return [Replica(f"w{name:02}", 0, "e", "f", capacity=9, tokens=0, sequences=0) for name in sorted(names)]


def home_of(candidates: list[Replica], name: str, load_factor: float = 1.25, last: Key | None = None) -> Replica:
    inputs = Inputs(PlacementRequest(10, session=name), Routing(load_factor=load_factor), tuple(candidates), {}, last)
    return candidates[best(candidates, session(candidates, inputs), last)]


@given(NAMES, st.floats(1.01, 3.0), st.lists(st.sampled_from(SESSIONS), min_size=1, max_size=200))
@examples(30)
def test_nobody_exceeds_the_bound(names: set[int], factor: float, requests: list[str]) -> None:
    candidates = replicas(names)
    for count, name in enumerate(requests, start=1):
        chosen = home_of(candidates, name, factor)
        index = candidates.index(chosen)
        candidates[index] = replace(chosen, sequences=chosen.sequences + 1)
        assert candidates[index].sequences <= max(math.ceil(factor * count / len(candidates)), LOAD_SLACK)


@given(NAMES, st.integers(31, 40))
@examples(30)
def test_one_that_joins_takes_only_its_own_sessions_and_gives_them_back(names: set[int], newcomer: int) -> None:
    before = {name: home_of(replicas(names), name).key for name in SESSIONS}
    after = {name: home_of(replicas(names | {newcomer}), name).key for name in SESSIONS}
    moved = {name for name in SESSIONS if before[name] != after[name]}
    assert {after[name] for name in moved} <= {(f"w{newcomer}", 0)}
    leaves = min(names)
    rest = {name: home_of(replicas(names - {leaves}), name).key for name in SESSIONS} if len(names) > 1 else before
    assert {name for name in SESSIONS if rest[name] != before[name]} == {
        name for name in SESSIONS if before[name] == (f"w{leaves:02}", 0)
    }


def test_many_sessions_spread_evenly() -> None:
    candidates = replicas(set(range(8)))
    counts = Counter(home_of(candidates, f"user {i}").key for i in range(4000))
    assert len(counts) == 8 and min(counts.values()) > 400 and max(counts.values()) < 600


def test_a_session_ignores_turns_and_returns_after_a_rush() -> None:
    candidates = replicas({1, 2, 3})
    home = home_of(candidates, "s", last=("w01", 0))
    assert home_of(candidates, "s", last=("w02", 0)) == home
    rushed = [replace(r, sequences=10) if r == home else r for r in candidates]
    elsewhere = home_of(rushed, "s")
    assert elsewhere.key != home.key
    assert home_of(rushed, "s", last=elsewhere.key) == elsewhere, "always the same second choice"
    assert home_of(candidates, "s", last=elsewhere.key) == home


def test_few_sequences_are_no_load() -> None:
    candidates = replicas({1, 2, 3})
    home = home_of(candidates, "s")
    some, more = ([replace(r, sequences=n) if r == home else r for r in candidates] for n in (3, 4))
    assert home_of(some, "s").key == home.key != home_of(more, "s").key


def test_without_a_session_the_least_loaded() -> None:
    candidates = replicas({1, 2, 3})
    candidates[1] = replace(candidates[1], tokens=0)
    candidates = [replace(r, tokens=100 * (i != 1)) for i, r in enumerate(candidates)]
    assert home_of(candidates, "") == candidates[1]
