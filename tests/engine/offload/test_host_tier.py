"""The host tier: evicted prefixes and preempted sequences come back by copies, and never with other tokens."""

import random
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from engine.harness import TINY, Driver, fill_pages, request
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.page_hash import page_hashes
from millrace_serve.engine.cache.block_pool import InvariantError
from millrace_serve.engine.cache.changes import BlockChanges
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import (
    Abort,
    FinishReason,
    FlushCache,
    KvArrived,
    KvOffered,
    LeaseEnded,
    RequestId,
    Route,
    SequenceOutput,
)
from millrace_serve.engine.offload.host_tier import Copy, HostTier
from millrace_testing.blocks import block, blocks
from millrace_testing.examples import examples
from pydantic import ValidationError

PROMPT = list(range(20, 34))  # 14 tokens: 3 full pages of 4, and 2 tokens


class Tiered(Driver):
    """A simulated engine with room for `host_pages` copies. `held`: no copy ends."""

    def __init__(self, role: Role = Role.UNIFIED, host_pages: int = 100, **config: Any) -> None:
        self.firsts: dict[RequestId, SequenceOutput] = {}
        super().__init__(role, host_pages=host_pages, **config)
        self.held = False
        poll = (copier := self.engine.host.copier).poll
        copier.poll = lambda: [] if self.held else poll()  # type: ignore[method-assign]
        assert copier.num_slots == self.engine.load().host_pages_total == host_pages

    def copying(self) -> bool:
        return self.engine.host.copier.busy and not self.held

    def ask(self, room: int, tokens: list[int], **wants: Any) -> None:
        route = Route.EXPORT if self.here._role is Role.PREFILL else Route.LOCAL
        self.submit(request(room, tokens, route, **{"max_tokens": 2, **wants}))

    def cached(self, room: int) -> int:
        return self.firsts[RequestId(room, 0)].found.cached_tokens

    def tiers(self, room: int) -> tuple[int, int]:
        """Cached tokens from the host tier and from another worker."""
        return (first := self.firsts[RequestId(room, 0)]).found.host_cached_tokens, first.found.fetched_tokens

    def _take(self, output: SequenceOutput) -> None:
        self.firsts.setdefault(output.id, output)
        super()._take(output)

    def push_out(self, room: int = 900) -> None:
        """Evict everything from the device's prefix cache."""
        self.ask(room, [199] * 4 * self.cache.pool.total, max_tokens=1)
        self.end_leases()
        assert not self.cache._tree.match(PROMPT, 3, b"")

    def end(self) -> None:
        self.held = False
        self.end_leases()
        assert not self.engine.host.copier.busy and not self.cache.host._under_way
        self.cache.host.check()
        self.check_whole()
        assert self.cache.host.tier.used == 0  # check_whole flushes


def evicted(make: Callable[..., Tiered] = Tiered, prompt: list[int] = PROMPT, **config: Any) -> Tiered:
    """The prefix cache had the prompt; now the host tier alone has it."""
    driver = make(max_model_len=60, **config)
    driver.ask(1, prompt)
    driver.end_leases()
    driver.push_out()
    return driver


@pytest.fixture(params=[True, False], ids=["overlap", "synchronous"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


@pytest.mark.parametrize("role", [Role.UNIFIED, Role.PREFILL])
def test_evicted_prefix_comes_back(role, overlap):
    driver = evicted(role=role, overlap=overlap)
    driver.ask(2, PROMPT)
    driver.end_leases()
    counters = driver.engine.load().counters
    assert driver.cached(2) == counters["cached_tokens"] == counters["host_cached_tokens"] == driver.tiers(2)[0] == 12
    assert counters["host_bytes/load"] == 3 * driver.engine.pool.layout.page_bytes < counters["host_bytes/store"]
    assert counters["host_seconds/store"] > 0 and counters["host_seconds/load"] > 0
    driver.end()


@pytest.mark.parametrize("role", [Role.UNIFIED, Role.PREFILL])
@pytest.mark.parametrize("why", ["abort", "deadline", "flush"])
def test_what_happens_during_a_fill(role, why):
    driver = evicted(role=role)
    driver.held = True
    driver.run(request(2, PROMPT, Route.EXPORT if role is Role.PREFILL else Route.LOCAL, timeout_s=5.0))
    assert not driver.engine.has_work() and 0 < driver.engine.wait_s() <= 0.001  # neither asleep nor busy
    if why == "abort":
        driver.tell(Abort(RequestId(2, 0)))
    elif why == "flush":
        driver.tell(FlushCache())
    else:
        driver.clock.now = 6.0
    driver.step()
    driver.run() if why == "flush" else driver.end_leases()
    load = driver.engine.load()
    assert load.pages_running == 4 and load.host_pages_used == (3 if why == "flush" else driver.cache.host.tier.used)
    driver.held = False
    driver.run()
    if why == "flush":
        assert driver.cached(2) == 12
    else:
        assert driver.finish[RequestId(2, 0)].finish is {"abort": FinishReason.ABORT}.get(why, FinishReason.ERROR)
    driver.end()


def test_page_that_was_evicted_during_its_copy_is_not_found():
    driver = Tiered(max_model_len=60)
    driver.ask(1, PROMPT)
    while not driver.engine.host.copier.busy:
        driver.step()
    driver.held = True
    driver.run()
    driver.push_out()
    driver.held = False
    driver.run()
    assert driver.cache.host.tier.find(page_hashes(PROMPT, 4)[:3]) == []
    driver.ask(2, PROMPT)
    driver.run()
    assert driver.cached(2) == 0
    driver.end()


def test_stores_are_one_at_a_time():
    """The others wait: each would take memory bandwidth from the steps."""
    driver, seen = Tiered(max_model_len=60, num_pages=40), 0
    driver.held = True
    for room in range(1, 5):
        driver.ask(room, [room] * 9)
        driver.run()
        seen += sum(job.to_host for job in driver.cache.host._under_way)
    assert seen == 4 and len(driver.cache.host.tier.offered) > 0
    driver.end()


@pytest.mark.parametrize("drafts", [0, 2])
@pytest.mark.parametrize("host_pages", [0, 4, 100])
def test_preempted_sequence_goes_on_where_it_was(host_pages, drafts, overlap):
    """Two sequences that grow until only one of them fits."""
    driver = Tiered(Role.DECODE, host_pages, overlap=overlap, num_pages=9, draft_tokens=drafts)
    driver.ask(1, [21] * 9, max_tokens=20)
    driver.ask(2, [22] * 9, max_tokens=12, temperature=1.0, seed=3)
    driver.run()
    load = driver.engine.load()
    assert load.counters["preemptions"] == load.counters["resumed"] + load.counters["recomputed"] == 1
    if host_pages == 100:
        assert load.counters["resumed"] == 1 and load.counters.get("host_bytes/load", 0) > 0
    elif not host_pages:  # drafts are as long as pages here
        assert not load.counters.get("host_bytes/load", 0) and (load.counters["recomputed"] or drafts)
    driver.end()


@pytest.mark.parametrize("steps", [0, 1])
def test_preempted_sequence_that_ends_while_it_is_saved(steps):
    driver = Tiered(Role.DECODE, num_pages=9)
    driver.ask(1, [21] * 9, max_tokens=20)
    driver.ask(2, [22] * 9, max_tokens=20)
    while not driver.engine.load().counters["preemptions"]:
        driver.step()
        driver.held = bool(driver.engine.load().counters["preemptions"])
    for _ in range(steps):
        driver.step()
    driver.run(Abort(RequestId(2, 0)))
    assert driver.finish[RequestId(2, 0)].finish is FinishReason.ABORT and RequestId(2, 0) in driver.here.live
    driver.end()
    assert driver.finish[RequestId(1, 0)].finish is FinishReason.LENGTH


@pytest.mark.parametrize(("here", "offered"), [(3, 2), (3, 3), (2, 3)])
def test_pages_come_from_another_worker_if_it_has_more(here, offered):
    driver, id = evicted(prompt=PROMPT[: 4 * here], role=Role.PREFILL), RequestId(2, 0)
    driver.submit(msgspec.structs.replace(request(2, PROMPT, Route.EXPORT), fetches_prefix=True))
    driver.step(KvOffered(id, offered))
    reserved, fetched = driver.reserved[id], offered > here
    assert reserved.num_cached_pages == (0 if fetched else offered) and len(reserved.page_ids) == offered
    if fetched:
        fill_pages(driver, reserved.page_ids, PROMPT[:12], 0)
    driver.run(KvArrived(id))
    counted = tuple(driver.engine.load().counters[f"{source}_tokens"] for source in ("host_cached", "fetched"))
    assert driver.cached(2) == 12 and driver.tiers(2) == counted == ((0, 12) if fetched else (12, 0))
    driver.end()


@pytest.mark.parametrize("known", [True, False])
def test_long_prompt_that_the_tier_has_waits_for_no_other(known):
    """Only what is left to compute makes it long."""
    driver = evicted(max_prefill_tokens=4)
    for room, prompt in enumerate([[9] * 14, PROMPT if known else PROMPT[::-1]], start=2):
        driver.ask(room, prompt)
        driver.step()
    assert bool(driver.here.waiting.head()) is not known
    driver.end()


@pytest.mark.parametrize("role", [Role.UNIFIED, Role.PREFILL])
def test_wrong_bytes_fail_one_request_and_empty_the_tier(role, overlap):
    driver = evicted(role=role, overlap=overlap)
    driver.engine.host.copier._host[:] = 7
    driver.ask(2, PROMPT)
    driver.end_leases()
    assert driver.finish[RequestId(2, 0)].error.reason == "KV_MISMATCH" and driver.cache.host.tier.used == 0
    driver.ask(3, PROMPT)
    driver.end_leases()
    assert driver.cached(3) == 0 and RequestId(3, 0) in driver.firsts
    driver.end()


def small(kind: Callable[..., Any], role: Role, rng: random.Random) -> Any:
    """With few pages on the device and on the host, so that most events move some."""
    return kind(
        role,
        rng.choice([1, 3, 8, 100]),
        num_pages=rng.randrange(9, 16),
        overlap=rng.random() < 0.7,
        draft_tokens=rng.choice([0, 2]),
        max_prefill_tokens=rng.choice([3, 8, 30]),
    )


@pytest.mark.parametrize("role", [Role.UNIFIED, Role.PREFILL, Role.DECODE])
@examples(10)
@given(data=st.data())
def test_any_order_of_events(role: Role, data: st.DataObject):
    """Tokens are the oracle's (the driver compares them), pages carry canaries, and nothing is lost in the end."""
    rng = random.Random(data.draw(st.integers(0, 2**32)))
    driver = small(Tiered, role, rng)
    for room in range(1, 25):
        prompt = [rng.randrange(16, 18)] * 4 * rng.randrange(1, 5) + [rng.randrange(16, 18)] * rng.randrange(1, 5)
        driver.ask(
            room,
            prompt,
            max_tokens=rng.randrange(1, 12),
            temperature=float(rng.random() < 0.5),
            seed=rng.randrange(3),
            timeout_s=rng.choice([None, None, 4.0]),
            priority=rng.randrange(2),
        )
        for _ in range(rng.randrange(6)):
            driver.held = rng.random() < 0.4
            driver.step()
        driver.clock.now += rng.choice([0.0, 0.0, 1.0])
        event = rng.random()
        if event < 0.2:
            driver.tell(Abort(RequestId(rng.randrange(1, room + 1), 0)))
        elif event < 0.25:
            driver.tell(FlushCache())
        elif event < 0.6 and driver.parts:
            driver.tell(LeaseEnded(rng.choice(sorted(driver.parts))))
    driver.held = False
    for _ in range(25):
        driver.end_leases()
    errors = {output.error.reason for output in driver.finish.values() if output.error}
    assert errors <= {"DEADLINE_EXCEEDED", "KV_EXPIRED"}
    driver.end()


@examples(20)
@given(st.integers(1, 4), st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=60))
def test_tier_under_random_use(total: int, ops: list[tuple[int, int]]):
    """Against a plain model: which blocks are whole, who holds a pin; slots of pinned copies are never given away."""
    changes = BlockChanges()
    tier, pinned, whole = HostTier(total, changes), list[Copy](), set[bytes]()
    for op, number in ops:
        its = block(number)
        if op == 0 and tier.get(its) is None:
            copy = tier.begin(its)
            assert (copy is None) == (len({c.slot for c in pinned}) == total)
            if copy is not None:
                assert copy.slot not in {c.slot for c in pinned}
                pinned.append(copy)
        elif op == 1 and pinned and not pinned[0].is_whole:
            tier.end(pinned.pop(0), good=number > 0)
        elif op == 2 and (found := tier.find([its])):
            tier.pin(found[0])
            pinned.append(found[0])
        elif op == 3 and pinned and pinned[-1].is_whole:
            tier.unpin(pinned.pop())
        elif op == 4:
            tier.touch([its])
        elif op == 5 and number == 0:
            tier.clear()
        stored, removed = changes.take()
        whole = (whole | set(stored)) - set(removed)
        assert whole == {b for b in blocks(*range(6)) if tier.find([b])}
        tier.check(pinned)
        assert tier.used <= total


def test_copy_used_longest_ago_goes_first():
    tier = HostTier(2, BlockChanges())
    one, two, three = blocks(1, 2, 3)
    for its in (one, two):
        tier.end(tier.begin(its), good=True)
    tier.touch([one])
    assert tier.begin(three) is not None and tier.get(one) and not tier.get(two)
    assert tier.find([one, three]) == tier.find([one]) != []  # the third is on its way


def test_lost_slot_is_found():
    tier = HostTier(2, BlockChanges())
    tier._free.pop()
    with pytest.raises(InvariantError, match="1 slots free, 0 with a copy, total 2"):
        tier.check([])


def test_each_tier_needs_the_one_above_it():
    with pytest.raises(ValidationError, match=r"host_cache_gib=2\.0: needs prefix_cache"):
        EngineConfig.model_validate({**TINY, "host_cache_gib": 2.0, "prefix_cache": False})
    with pytest.raises(ValidationError, match="disk_cache=/x: needs host_cache_gib"):
        EngineConfig.model_validate({**TINY, "disk_cache": "/x"})
