"""Who has which prefix: the indexes against plain models of them, and when a prefix is fetched."""

import functools
from collections import OrderedDict
from collections.abc import Iterable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from millrace.v1.worker_pb2 import CacheChange
from millrace_common.step_times import StepTimes
from millrace_router.config import Policy, Routing
from millrace_router.policy import kv_index
from millrace_router.policy.choose import Chooser, Decision, Situation
from millrace_router.policy.holders import depths
from millrace_router.policy.kv_index import HOST_WEIGHT, KvIndex
from millrace_router.policy.placer import Indexes
from millrace_router.policy.prefix_fetches import (
    MOST_PREFIX_FETCH_S,
    START_PREFIX_FETCH_S,
    best_prefix_fetch,
    prefix_sources,
    saved,
)
from millrace_router.policy.prefix_index import MAX_DEAD, PrefixIndex
from millrace_router.policy.scoring import Inputs, cached
from millrace_router.policy.snapshot import Placement, PlacementRequest, Replica, View
from millrace_testing.blocks import blocks
from millrace_testing.examples import examples
from router.policy import test_choose

WANT = PlacementRequest(tokens=1001, page_size=10)  # 100 full pages
MEASURED = {"page_bytes": 1000, "times": StepTimes(token_s=1e-3), "read_bytes_per_s": 1e6, "prefix_fetch_s": 0.01}
replica = functools.partial(test_choose.replica, **MEASURED)
P1, P2 = replica("p1"), replica("p2")
D1 = replica("d1", sources=frozenset({"e-p1", "e-p2"}))
VIEW = View((P1, P2), (D1,))
Pages = Mapping[str, int]
NONE: Pages = {}


def decide(view: View = VIEW, own: Pages = NONE, served: Pages = NONE, want: PlacementRequest = WANT) -> Decision:
    """`own` and `served`: pages by address."""
    fetchable = {(f"e-{address}", 0): pages for address, pages in {**own, **served}.items()}
    chooser = Chooser(Policy.KV_AWARE, Policy.LEAST_LOADED, Routing())
    decision = chooser.choose(Situation(view, want, {}, dict(fetchable), {}, fetchable))
    assert decision is not None
    return decision


def test_the_answer_comes_back_from_the_decode_worker() -> None:
    decision = decide(own={"p1": 50}, served={"d1": 90})
    fetch = decision.prefix_fetch
    assert decision.placement.prefill == P1 and fetch is not None
    assert (fetch.source, fetch.num_pages, fetch.missing) == (D1, 90, 400)
    assert fetch.fetch_s == pytest.approx(0.01 + 40 * 1000 / 1e6)
    assert fetch.compute_s == pytest.approx(400 / 1000)
    assert decision.cached_tokens == 900
    assert decision.attributes()["millrace.route.prefix_source"] == "d1/0"


def test_a_fetch_that_takes_longer_is_shown_and_not_done() -> None:
    slow = replica("p1", times=StepTimes(token_s=1e-6))
    decision = decide(View((slow,), (D1,)), own={"p1": 50}, served={"d1": 90})
    assert decision.prefix_fetch is None and decision.placement.prefix_fetch and decision.cached_tokens == 500
    assert "millrace.route.prefix_source" not in decision.attributes()


def test_computing_far_behind_the_beginning_of_a_prompt_takes_longer() -> None:
    """An H200 with 30 layers: 1,000 tokens take 0.05 s at the beginning, and 0.5 s behind 50,000."""
    times = StepTimes(token_s=5e-5, pair_s=6e-9)
    fetch = best_prefix_fetch(replica("p", times=times), 50_000, WANT, [(51_000, D1)])
    assert fetch is not None and fetch.compute_s == pytest.approx(0.05 + 6e-9 * (1000 * 500 + 50_000 * 1500))


def test_a_replica_serves_another_of_its_worker_and_not_itself() -> None:
    first, second = replica("p1"), replica("p1", index=1)
    rows = prefix_sources([first, second], {first.process: 40, second.process: 60}, WANT)
    assert [tokens for tokens, _ in rows] == [600, 400]
    found = best_prefix_fetch(first, 400, WANT, rows)
    assert found is not None and found.source == second
    assert best_prefix_fetch(second, 600, WANT, rows) is None
    assert best_prefix_fetch(second, 0, WANT, rows).source == first, "whatever another index knows of its own pages"
    assert saved([second], [0], WANT, rows[:1]) == [0]


def test_an_idle_worker_that_fetches_is_better_than_a_busy_one_that_has_it() -> None:
    busy = replica("p1", tokens=500)
    decision = decide(View((busy, P2), (D1,)), own={"p1": 90})
    assert decision.placement.prefill == P2 and decision.prefix_fetch and decision.prefix_fetch.source == busy
    unable = replica("p2", times=StepTimes(token_s=1e-6))  # fetching is no gain for it
    assert decide(View((busy, unable), (D1,)), own={"p1": 90}).placement.prefill == busy


def test_before_anything_is_measured_pages_of_a_large_model_are_computed() -> None:
    new = {"page_bytes": 4 << 20, "times": StepTimes(), "read_bytes_per_s": 0.0, "prefix_fetch_s": 0.0}
    want = PlacementRequest(tokens=8001, page_size=64)
    view = View((replica("p1", **new),), (replica("d1", sources=frozenset({"e-p1"}), **new),))
    decision = decide(view, served={"d1": 120}, want=want)
    assert decision.placement.prefix_fetch is not None and decision.prefix_fetch is None
    assert decision.placement.prefix_fetch.fetch_s > START_PREFIX_FETCH_S


def test_a_slow_spell_is_forgotten() -> None:
    found = best_prefix_fetch(replica("p", prefix_fetch_s=30.0), 0, WANT, [(1000, D1)])
    assert found is not None and found.fetch_s == pytest.approx(MOST_PREFIX_FETCH_S + 0.1)


@given(
    st.lists(st.tuples(st.integers(0, 120), st.sampled_from(["f", "g"])), max_size=5),
    st.integers(0, 120),
    st.integers(1, 1100),
)
def test_a_prefix_fetch_has_more_than_the_fetcher_and_leaves_a_token(
    rows: list[tuple[int, str]], own: int, tokens: int
) -> None:
    replicas = [replica(f"d{i}", fingerprint=fingerprint) for i, (_, fingerprint) in enumerate(rows)]
    pages = {r.process: count for r, (count, _) in zip(replicas, rows, strict=True) if count}
    want = PlacementRequest(tokens=tokens, page_size=10)
    found = best_prefix_fetch(P1, want.cached(own), want, prefix_sources(replicas, pages, want))
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
    assert found == {a: 4, b: 2}  # what they can serve
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
            st.sampled_from([0.0, 1.0, 1e-3, 1e-6]),
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
    want = PlacementRequest(tokens=tokens, page_size=10)
    replicas = [
        replica(
            f"p{i}",
            fingerprint=layout,
            excluded="ejected" if ejected else "",
            tokens=7 * i,
            times=StepTimes(token_s=speed),
            read_bytes_per_s=read,
            prefix_fetch_s=prefix_fetch_s,
        )
        for i, (_, ejected, layout, speed, read, prefix_fetch_s) in enumerate(rows)
    ]
    pages = {r.process: n for r, (n, *_) in zip(replicas, rows, strict=True) if n}
    offers = prefix_sources(replicas, pages, want)
    assert list(offers) == sorted(
        [(want.cached(pages[r.process]), r) for r in replicas if r.process in pages and not r.excluded],
        key=lambda row: -row[0],
    )

    def alone(r: Replica) -> tuple[float, float]:
        own = want.cached(pages.get(r.process, 0))
        prefix_fetch = best_prefix_fetch(r, own, want, offers)
        saved: float = own
        if prefix_fetch is not None and prefix_fetch.worthwhile:
            saved = own + prefix_fetch.missing - prefix_fetch.missing * prefix_fetch.fetch_s / prefix_fetch.compute_s
        return r.load + 2.0 * (want.tokens - saved), r.sequences

    inputs = Inputs(want, Routing(cache_weight=2.0), tuple(replicas), pages, None, offers)
    assert list(cached(replicas, inputs)) == [alone(r) for r in replicas]


# ------------------------------------------------------------------------------------- indexes


SALT = b"tenant"
CHAINS = [blocks(*(100 * chain + (0 if place < 3 else chain) + place for place in range(9))) for chain in range(4)]
for chain in CHAINS[1:]:
    chain[:2] = CHAINS[0][:2]  # all begin alike


def leading(held: set[bytes], chain: list[bytes]) -> int:
    return next((i for i, block in enumerate(chain) if block not in held), len(chain))


# ------------------------------------------------------------------------------------- bits and bisection


@given(st.lists(st.integers(0, 9), max_size=5), st.integers(0, 9))
def test_depths_are_where_the_masks_shrink(holders: list[int], length: int) -> None:
    masks = [sum(1 << i for i, depth in enumerate(holders) if depth > block) for block in range(length)]
    looked_up = []

    def lookup(its: bytes) -> int:
        looked_up.append(its)
        return masks[int.from_bytes(its)]

    found = depths(blocks(*range(length)), lookup, (1 << len(holders)) - 1)
    expected = {i: min(depth, length) for i, depth in enumerate(holders) if min(depth, length)}
    assert {i: depth for depth, mask in found for i in range(len(holders)) if mask >> i & 1} == expected
    assert len(looked_up) == len(set(looked_up))


def test_a_long_prompt_needs_few_lookups() -> None:
    calls = []
    found = depths(blocks(*range(10_000)), lambda its: calls.append(its) or int(int.from_bytes(its) < 777), 1)
    assert found == [(777, 1)] and len(calls) < 20


# ------------------------------------------------------------------------------------- the KV index


def change(
    after: int, sequence: int, stored: Iterable[bytes] = (), removed: Iterable[bytes] = (), snapshot: bool = False
) -> CacheChange:
    return CacheChange(after=after, sequence=sequence, stored=stored, removed=removed, snapshot=snapshot)


class Worker:
    """A prefix cache, and what it still has to tell."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()
        self.sequence = 0
        self.messages: list[CacheChange] = [change(0, 0, snapshot=True)]

    def change(self, stored: set[bytes], removed: set[bytes]) -> None:
        self.blocks = (self.blocks - removed) | stored
        self.messages.append(change(self.sequence, self.sequence + 1, sorted(stored), sorted(removed)))
        self.sequence += 1

    def snapshot(self) -> list[CacheChange]:
        blocks = sorted(self.blocks)
        first = change(self.sequence, self.sequence, blocks[:3], snapshot=True)
        return [first, change(self.sequence, self.sequence, blocks[3:])]


class KvIndexMachine(RuleBasedStateMachine):
    """Messages arrive late, get lost, and workers restart. What the index says is what the messages that arrived say;
    of a worker with a gap it says nothing until the next snapshot.
    """

    def __init__(self) -> None:
        super().__init__()
        self.index = KvIndex()
        self.workers: dict[tuple[str, int], Worker] = {}
        self.told: dict[tuple[str, int], set[bytes]] = {}  # as of the messages that arrived
        self.behind: dict[tuple[str, int], int] = {}
        self.epochs = 0

    @precondition(lambda self: len(self.workers) < 3)
    @rule()
    def start(self) -> None:
        self.workers[f"e{self.epochs}", 0] = Worker()
        self.epochs += 1

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def run_a_prompt(self, data: st.DataObject) -> None:
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        chain = data.draw(st.sampled_from(CHAINS))
        worker.change(set(chain[: data.draw(st.integers(1, 9))]) - worker.blocks, set())

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """The end of a chain; where chains begin alike, of all of them."""
        worker = self.workers[data.draw(st.sampled_from(sorted(self.workers)))]
        chain, keep = data.draw(st.sampled_from(CHAINS)), data.draw(st.integers(0, 8))
        gone = set(chain[keep:])
        if keep < 2:
            gone |= {block for other in CHAINS for block in other[2:]}
        worker.change(set(), worker.blocks & gone)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.workers)))
        worker = self.workers[key]
        for _ in range(data.draw(st.integers(1, 4))):
            if not worker.messages:
                return
            message = worker.messages.pop(0)
            missed = not message.snapshot and self.behind.get(key) != message.after
            assert self.index.apply(key, message) is not missed
            if missed:
                self.told.pop(key, None)
                self.behind.pop(key, None)
                worker.messages = worker.snapshot()  # what asking again gets
                continue
            known = set() if message.snapshot else self.told[key]
            self.told[key] = (known - set(message.removed)) | set(message.stored)
            self.behind[key] = message.sequence

    @precondition(lambda self: any(worker.messages for worker in self.workers.values()))
    @rule(data=st.data())
    def lose(self, data: st.DataObject) -> None:
        worker = self.workers[data.draw(st.sampled_from(sorted(k for k, w in self.workers.items() if w.messages)))]
        worker.messages.pop(data.draw(st.integers(0, len(worker.messages) - 1)))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.workers)))
        del self.workers[key]
        self.told.pop(key, None)
        self.behind.pop(key, None)
        self.index.forget(key)

    @invariant()
    def the_index_is_what_was_told(self) -> None:
        for chain in CHAINS:
            depths_told = {key: leading(blocks, chain) for key, blocks in self.told.items() if _is_closed(blocks)}
            found = self.index.lookup(chain)
            assert {key: found.get(key, 0) for key in depths_told} == depths_told
            assert found.keys() <= self.told.keys()

    def teardown(self) -> None:
        """Changes clean the table of everybody who is gone, and give their bits again."""
        for key in [*self.told]:
            self.index.forget(key)
        assert self.index.lookup(CHAINS[0]) == {}
        self.index.apply(("last", 0), change(0, 0, snapshot=True))
        for number in range(2 * kv_index.SHARDS):
            self.index.apply(("last", 0), change(number, number + 1))
        assert len(self.index) == 0 and self.index._sequences.keys() == {("last", 0)}
        assert self.index._bits.dead == 0 and self.index._bits.live.bit_count() == 1


def _is_closed(blocks: set[bytes]) -> bool:
    """Half a snapshot is not always."""
    return all(set(chain[: i + 1]) <= blocks for chain in CHAINS for i, block in enumerate(chain) if block in blocks)


TestKvIndex = KvIndexMachine.TestCase
TestKvIndex.settings = examples(25, stateful_step_count=40)


# ------------------------------------------------------------------------------------- the prefix index


@examples(50)
@given(
    st.integers(1, 20),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 9), st.integers(0, 2)), min_size=1, max_size=40),
)
def test_prefix_index_is_a_bounded_lru(size: int, prompts: list[tuple[int, int, int]]) -> None:
    index, model = PrefixIndex(size), OrderedDict[bytes, set[int]]()
    for number, length, worker in prompts:
        chain = CHAINS[number][:length]
        index.note(chain, [(f"e{worker}", 0)])
        for block in reversed(chain[:size]):
            model.setdefault(block, set()).add(worker)
            model.move_to_end(block)
        while len(model) > size:
            model.popitem(last=False)
        assert len(index) == len(model) <= size
        for asked in CHAINS:
            found = index.lookup(asked)
            for name in range(3):
                blocks = {block for block, workers in model.items() if name in workers}
                assert found.get((f"e{name}", 0), 0) == leading(blocks, asked)


def test_workers_that_are_gone_are_forgotten_and_their_bits_used_again() -> None:
    index = PrefixIndex(1000)
    index.note(CHAINS[0], [("stays", 0)])
    for number in range(3 * MAX_DEAD):
        index.note(CHAINS[1], [(f"e{number}", 0)])
        index.keep({("stays", 0)})
        assert index.lookup(CHAINS[1]) == {("stays", 0): 2}
    assert max(mask.bit_length() for mask in index._masks.values()) <= MAX_DEAD + 1
    assert len(index) <= len(CHAINS[0]) + len(CHAINS[1])


# ------------------------------------------------------------------------------------- which index for whom


LIMITED = Routing.model_validate({"slo": {"ttft": 1.0}})


def test_only_the_indexes_that_somebody_asks() -> None:
    def kept(prefill: Policy, decode: Policy, routing: Routing = Routing()) -> tuple[bool, bool]:
        indexes = Indexes(prefill, decode, routing)
        assert bool(indexes.blocks(list(range(64)), 64, SALT)) is (indexes.prefix is not None or indexes.kv is not None)
        return indexes.prefix is not None, indexes.kv is not None

    assert kept(Policy.LEAST_LOADED, Policy.SESSION) == (False, False)
    assert kept(Policy.PREFIX_AWARE, Policy.LEAST_LOADED) == (True, False)
    assert kept(Policy.KV_AWARE, Policy.PREFIX_AWARE) == (True, True)
    assert kept(Policy.LEAST_LOADED, Policy.LEAST_LOADED, LIMITED) == (True, False)
    assert kept(Policy.KV_AWARE, Policy.LEAST_LOADED, LIMITED) == (False, True)


def test_each_policy_asks_its_own_index() -> None:
    indexes = Indexes(Policy.PREFIX_AWARE, Policy.KV_AWARE, Routing())
    assert indexes.kv is not None
    want = PlacementRequest(tokens=200, pages=indexes.blocks(list(range(200)), 64, SALT))
    assert len(want.pages) == 3 and indexes.lookup(want) == ({}, {}, {})
    indexes.note(want, Placement(replica("p", epoch="p"), replica("d", epoch="d")))
    indexes.kv.apply(("d", 0), change(0, 0, want.pages[:1], snapshot=True))
    assert indexes.lookup(want) == ({("p", 0): 3, ("d", 0): 3}, {("d", 0): 1}, {("d", 0): 1})
    assert indexes.lookup(PlacementRequest(tokens=200)) == ({}, {}, {})
    indexes.keep([("d", 0)])
    assert indexes.lookup(want) == ({("d", 0): 3}, {("d", 0): 1}, {("d", 0): 1})


def test_blocks_are_of_full_pages_of_the_list_and_salt_asked() -> None:
    indexes = Indexes(Policy.KV_AWARE, Policy.KV_AWARE, Routing())
    tokens = list(range(130))
    first = indexes.blocks(tokens, 64, SALT)
    assert len(first) == 2 and indexes.blocks(tokens, 64, SALT) is first
    assert not set(indexes.blocks(tokens, 64, b"another tenant")) & set(first)
    assert len(indexes.blocks(tokens, 65, SALT)) == 2 and indexes.blocks(tokens, 65, SALT) != first
    assert indexes.blocks([*tokens[:63], 7, *tokens[64:]], 64, SALT) != first
    assert indexes.blocks(tokens[:63], 64, SALT) == () == indexes.blocks(tokens, 0, SALT)
