"""The indexes of prefix caches against plain models of them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from millrace.v1.worker_pb2 import CacheChange
from millrace_router.config import Policy, Routing
from millrace_router.policy import kv_index
from millrace_router.policy.holders import Bits, depths
from millrace_router.policy.kv_index import KvIndex
from millrace_router.policy.placer import Indexes
from millrace_router.policy.prefix_index import MAX_DEAD, PrefixIndex
from millrace_router.policy.snapshot import Placement, Replica, Want
from millrace_testing.blocks import blocks

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


def test_a_bit_is_not_given_again_before_it_was_recycled() -> None:
    bits = Bits()
    a, b = bits.of(("a", 0)), bits.of(("b", 0))
    assert (a, b, bits.of(("a", 0))) == (1, 2, 1)
    bits.drop(("a", 0))
    assert bits.of(("c", 0)) == 4 and bits.live == 6 and ("a", 0) not in bits
    bits.recycle(bits.dead)
    assert bits.of(("d", 0)) == 1
    assert set(bits.holders(5)) == {("c", 0), ("d", 0)}


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
        assert len(self.index) == 0
        assert self.index._bits.dead == 0 and self.index._bits.live.bit_count() == 1


def _is_closed(blocks: set[bytes]) -> bool:
    """Half a snapshot is not always."""
    return all(set(chain[: i + 1]) <= blocks for chain in CHAINS for i, block in enumerate(chain) if block in blocks)


TestKvIndex = KvIndexMachine.TestCase
TestKvIndex.settings = settings(deadline=None, max_examples=60, stateful_step_count=40)


# ------------------------------------------------------------------------------------- the prefix index


@settings(deadline=None, max_examples=100)
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


def replica(name: str) -> Replica:
    return Replica(name, 0, name, "f", credits=1, tokens=0, sequences=0)


def test_only_the_indexes_that_somebody_asks() -> None:
    def kept(prefill: Policy, decode: Policy, local: int = 0) -> tuple[bool, bool]:
        indexes = Indexes(prefill, decode, Routing(local_prefill_tokens=local))
        assert bool(indexes.blocks(list(range(64)), 64, SALT)) is (indexes.prefix is not None or indexes.kv is not None)
        return indexes.prefix is not None, indexes.kv is not None

    assert kept(Policy.LEAST_LOADED, Policy.SESSION) == (False, False)
    assert kept(Policy.PREFIX_AWARE, Policy.LEAST_LOADED) == (True, False)
    assert kept(Policy.KV_AWARE, Policy.PREFIX_AWARE) == (True, True)
    assert kept(Policy.LEAST_LOADED, Policy.LEAST_LOADED, local=100) == (True, False)
    assert kept(Policy.KV_AWARE, Policy.LEAST_LOADED, local=100) == (False, True)


def test_each_policy_asks_its_own_index() -> None:
    indexes = Indexes(Policy.PREFIX_AWARE, Policy.KV_AWARE, Routing())
    assert indexes.kv is not None
    want = Want(tokens=200, pages=indexes.blocks(list(range(200)), 64, SALT))
    assert len(want.pages) == 3 and indexes.lookup(want) == ({}, {}, {})
    indexes.note(want, Placement(replica("p"), replica("d")))
    indexes.kv.apply(("d", 0), change(0, 0, want.pages[:1], snapshot=True))
    assert indexes.lookup(want) == ({("p", 0): 3, ("d", 0): 3}, {("d", 0): 1}, {("d", 0): 1})
    assert indexes.lookup(Want(tokens=200)) == ({}, {}, {})
    indexes.keep([("d", 0)])
    assert indexes.lookup(want) == ({("d", 0): 3}, {("d", 0): 1}, {("d", 0): 1})


def test_local_prefill_has_an_estimate_whatever_the_policy() -> None:
    indexes = Indexes(Policy.LEAST_LOADED, Policy.LEAST_LOADED, Routing(local_prefill_tokens=100))
    want = Want(tokens=200, pages=indexes.blocks(list(range(200)), 64, SALT))
    indexes.note(want, Placement(None, replica("d")))
    assert indexes.lookup(want) == ({}, {("d", 0): 3}, {})


def test_blocks_are_of_full_pages_and_of_the_list_and_the_salt_that_were_asked() -> None:
    indexes = Indexes(Policy.KV_AWARE, Policy.KV_AWARE, Routing())
    tokens = list(range(130))
    first = indexes.blocks(tokens, 64, SALT)
    assert len(first) == 2 and indexes.blocks(tokens, 64, SALT) is first
    assert not set(indexes.blocks(tokens, 64, b"another tenant")) & set(first)
    assert len(indexes.blocks(tokens, 65, SALT)) == 2 and indexes.blocks(tokens, 65, SALT) != first
    assert indexes.blocks([*tokens[:63], 7, *tokens[64:]], 64, SALT) != first
    assert indexes.blocks(tokens[:63], 64, SALT) == () == indexes.blocks(tokens, 0, SALT)
