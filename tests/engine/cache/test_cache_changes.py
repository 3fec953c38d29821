"""What engines say of their prefix caches: whoever adds it up has the cache."""

import random

import pytest
from engine.harness import Driver, request
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.page_hash import page_hashes
from millrace_serve.engine.cache.changes import CacheChanges
from millrace_serve.engine.cache.radix import Node
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import CacheChange, FlushCache
from millrace_testing.blocks import block
from millrace_testing.examples import examples

BLOCKS = st.integers(0, 5).map(block)


@given(st.lists(st.tuples(st.booleans(), BLOCKS)), st.lists(st.tuples(st.booleans(), BLOCKS)))
def test_only_the_difference_counts(first: list[tuple[bool, bytes]], second: list[tuple[bool, bytes]]) -> None:
    """A cache stores what it has not and removes what it has; two collectors in a row are as good as one."""
    cache: set[bytes] = set()
    told: set[bytes] = set()
    all_of_it = CacheChanges()
    for steps in (first, second):
        changes = CacheChanges()
        before = set(cache)
        for store, its in steps:
            if store and its not in cache:
                cache.add(its)
                changes.device.store(its)
            elif not store and its in cache:
                cache.remove(its)
                changes.device.remove(its)
        change = changes.take()
        assert bool(change) == (cache != before)
        if change is not None:
            assert set(change.stored) == cache - before and set(change.removed) == before - cache
            all_of_it.add(change)
    total = all_of_it.take() or CacheChange([], [])
    told = (told - set(total.removed)) | set(total.stored)
    assert told == cache
    assert not all_of_it and all_of_it.take() is None


def blocks_of(driver: Driver) -> set[bytes]:
    """Of the tree itself."""
    found, nodes = set(), [driver.cache._tree.root]
    while nodes:
        node: Node = nodes.pop()
        nodes += node.children.values()
        if node.parent is not None:
            found.add(node.block)
    return found


def hold_against_the_tree(driver: Driver, known: set[bytes]) -> None:
    events = driver.step()
    if events.cache is not None:
        assert events, "news of the cache alone are worth a message"
        known -= set(events.cache.removed)
        for its in events.cache.stored:
            assert its not in known
            known.add(its)
    assert known == blocks_of(driver)


def test_finished_prompt_is_named_by_its_page_hashes() -> None:
    driver, known = Driver(Role.UNIFIED), set()
    prompt = list(range(1, 11))
    driver.submit(request(1, prompt, max_tokens=3))
    while driver.engine.has_work():
        hold_against_the_tree(driver, known)
    assert set(page_hashes(prompt[:8], 4)) <= known
    driver.tell(FlushCache())
    hold_against_the_tree(driver, known)
    assert known == set()


@pytest.mark.parametrize("role", [Role.UNIFIED, Role.DECODE])
@examples(10)
@given(seed=st.integers(0, 2**32))
def test_sharing_eviction_and_preemption_are_all_told(role: Role, seed: int) -> None:
    rng = random.Random(seed)
    driver, known = Driver(role), set()
    for room in range(1, 9):
        prompt = [rng.randrange(10, 12) for _ in range(rng.randrange(1, 20))]
        driver.submit(request(room, prompt, max_tokens=rng.randrange(1, 9)))
        for _ in range(rng.randrange(4)):
            hold_against_the_tree(driver, known)
    while driver.engine.has_work():
        hold_against_the_tree(driver, known)
