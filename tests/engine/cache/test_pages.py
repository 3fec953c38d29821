"""Block pool, prefix cache, page hashes and the pool's memory."""

import hashlib
import random
import struct

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.page_hash import BLOCK_BYTES, page_hashes
from millrace_common.versions import KV_PROTOCOL
from millrace_serve.engine.cache.block_pool import FREE, BlockPool, Holder, InvariantError
from millrace_serve.engine.cache.kv_cache import CachedPrefix, KvCache
from millrace_serve.engine.cache.kv_pool import KvLayout, KvPool
from millrace_testing.blocks import block
from millrace_testing.examples import examples


def test_block_is_the_digest_of_the_link_before_and_the_tokens():
    """What other versions and languages must compute to share pages with us."""
    root = hashlib.blake2b(b"tenant", digest_size=32, person=b"millrace salt").digest()
    first = hashlib.blake2b(root + struct.pack("<3I", 1, 2, 2**32 - 1), digest_size=32).digest()
    second = hashlib.blake2b(first + struct.pack("<1I", 4), digest_size=32).digest()
    assert page_hashes([1, 2, 2**32 - 1, 4], 3, salt=b"tenant") == [first, second]


def test_blocks_chain_and_cover_a_partial_page():
    tokens = list(range(10))
    blocks = page_hashes(tokens, 4)
    assert len(blocks) == 3 and {len(block) for block in blocks} == {BLOCK_BYTES}
    assert page_hashes(tokens[4:], 4, prev=blocks[0]) == blocks[1:]
    assert page_hashes([], 4) == []


@given(st.lists(st.tuples(st.binary(max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=9)), max_size=40))
def test_equal_blocks_are_equal_salts_and_prefixes(prompts: list[tuple[bytes, list[int]]]):
    """Also of partial pages, and whatever of the salt looks like tokens."""
    seen: dict[bytes, tuple[bytes, list[int]]] = {}
    for salt, tokens in prompts:
        for end, its in zip(range(4, 13, 4), page_hashes(tokens, 4, salt=salt), strict=False):
            assert seen.setdefault(its, (salt, tokens[:end])) == (salt, tokens[:end])


def test_pool_never_hands_out_the_sink_and_counts_by_strongest_holder():
    pool = BlockPool(5)
    pages = pool.allocate(4)
    assert sorted(pages) == [1, 2, 3, 4]
    pool.hold(pages[:2], Holder.PUBLISHED)
    pool.hold(pages[:1], Holder.CACHE)
    pool.drop(pages, Holder.RUNNING)
    assert (pool.num_running, pool.num_published, pool.num_cached, pool.num_free) == (0, 2, 0, 2)
    pool.drop(pages[:2], Holder.PUBLISHED)
    assert (pool.num_cached, pool.num_free) == (1, 3)
    assert sorted(pool.freed) == sorted(pages[1:])
    pool.check()


def test_pages_of_an_allocation_ascend_whatever_order_they_came_back_in():
    pool = BlockPool(9)
    pages = pool.allocate(8)
    pool.drop([5, 2, 7, 1, 3, 8, 4, 6], Holder.RUNNING)
    assert pool.allocate(4) + pool.allocate(4) == [*sorted([3, 8, 4, 6]), *sorted([5, 2, 7, 1])]
    assert pages == list(range(1, 9))
    pool.check()


@pytest.mark.parametrize("act", [lambda p: p.hold([1], Holder.RUNNING), lambda p: p.drop([1], Holder.CACHE)])
def test_pool_refuses_what_would_lose_a_page(act):
    with pytest.raises(InvariantError, match=r"page 1 .* free"):
        act(BlockPool(3))


def test_check_names_the_numbers():
    pool = BlockPool(4)
    pool._free.pop()
    with pytest.raises(InvariantError, match=r"free list has 2 entries .* free 3"):
        pool.check()


def test_lru_eviction_takes_the_oldest_leaf_and_spares_pages_in_use():
    cache = KvCache(6, 2, True)
    old, young = finish(cache, [1, 1, 2, 2]), finish(cache, [3, 3])
    held, prefix = cache.match([3, 3, 9], 1, b"")
    assert held == young and cache.available == 4
    taken = cache.allocate(3)
    assert taken is not None and old[1] in taken and old[0] not in taken  # leaf first, free pages before it
    assert cache.match([1, 1, 2, 2], 2, b"")[0] == [old[0]]
    assert cache.allocate(2) is None  # the rest is in use
    cache.release(prefix, held)


def test_equal_pages_of_two_sequences_keep_the_first_and_pin_it():
    cache = KvCache(8, 2, True)
    a, b = start(cache, [1, 1, 2, 2]), start(cache, [1, 1, 2, 2, 3, 3])
    for tokens, (pages, prefix) in (([1, 1, 2, 2], a), ([1, 1, 2, 2, 3, 3], b)):
        cache.insert(prefix, tokens, pages, page_hashes(tokens, 2))
    cache.release(a[1], a[0])
    assert cache.pool.num_cached == 0  # b's third page hangs below a's two
    cache.release(b[1], b[0])
    assert cache.pool.num_cached == 3
    assert cache.match([1, 1, 2, 2, 3, 3], 3, b"")[0] == [*a[0], b[0][2]]


def test_kept_pages_are_evicted_last_until_their_time_ends():
    now = 0.0
    cache = KvCache(17, 2, True, clock=lambda: now)
    long, short, plain = (finish(cache, [n, n, n, n], keep_s) for n, keep_s in ((1, 3600), (2, 300), (3, 0)))
    order = [*reversed(plain), *reversed(short), *reversed(long)]
    assert evicted(cache) == order, "the sooner its time ends the sooner; none is refused"
    again = finish(cache, [2, 2, 2, 2], 300) + finish(cache, [3, 3, 3, 3])
    now = 360.0
    assert evicted(cache) == [again[3], again[2], again[1], again[0]], "its time is over: it is the youngest"


def test_tenants_share_half_of_the_pages_to_keep():
    cache = KvCache(17, 2, True)
    first = finish(cache, [1] * 20, 3600, b"a")
    second = finish(cache, [1] * 10, 3600, b"b")
    order = evicted(cache)
    assert set(order[-12:]) == {*first[:8], *second[:4]}, "the leading pages, and the other tenant's half of the half"
    assert finish(cache, [1] * 20, 3600, b"c")[:8] == evicted(cache)[:-9:-1], "evicted pages do not count"


def test_disabled_cache_finds_nothing():
    cache = KvCache(4, 2, False)
    finish(cache, [1, 1])
    assert cache.match([1, 1], 1, b"")[0] == [] and cache.pool.num_free == 3


def start(cache: KvCache, tokens: list[int], salt: bytes = b"") -> tuple[list[int], CachedPrefix]:
    own = cache.allocate(len(tokens) // cache.page_size)
    assert own is not None
    return own, CachedPrefix(cache._tree.root, 0, salt)


def finish(cache: KvCache, tokens: list[int], keep_s: int = 0, salt: bytes = b"") -> list[int]:
    pages, prefix = start(cache, tokens, salt)
    cache.insert(prefix, tokens, pages, page_hashes(tokens, cache.page_size, salt=salt))
    if keep_s:
        cache.keep(prefix, keep_s)
    cache.release(prefix, pages)
    return pages


def evicted(cache: KvCache) -> list[int]:
    """All idle pages in their order; all are free afterwards."""
    free = {page for page in range(1, cache.pool.total + 1) if cache.pool.state(page) == FREE}
    order: list[int] = []
    for count in range(cache.pool.num_free + 1, cache.available + 1):
        pages = cache.allocate(count)
        assert pages is not None
        order += set(pages) - free - set(order)
        cache.pool.drop(pages, Holder.RUNNING)
    return order


def weak(blocks: list[bytes], bits: int) -> list[bytes]:
    return [block(one[0] % (1 << bits)) for one in blocks] if bits else blocks


@examples(40)
@given(st.integers(0, 2**32), st.booleans(), st.sampled_from([0, 1, 4]))
def test_cache_under_random_use(seed: int, enabled: bool, bits: int):
    """Sequences of two salts over few distinct tokens share, extend, publish, hold, keep, serve and leave; pages keep
    their tokens all along. `bits`: of the blocks, in place of 256.
    """
    rng, now = random.Random(seed), 0.0
    cache, content, told = KvCache(12, 2, enabled, clock=lambda: now), {}, set[bytes]()
    live: list[tuple[list[int], list[int], CachedPrefix, int]] = []
    served: list[list[int]] = []
    for _ in range(60):
        act, salt, now = rng.random(), rng.choice((b"", b"x")), now + rng.choice((0, 30, 120))
        tokens = [rng.randrange(2) for _ in range(rng.randrange(2, 9) // 2 * 2)]
        if act < 0.45:
            pages, prefix = cache.match(tokens, len(tokens) // 2, salt)
            assert all(content[page] == (salt, tokens[: 2 * i + 2]) for i, page in enumerate(pages))
            own = cache.allocate(len(tokens) // 2 - len(pages))
            if own is None:
                cache.release(prefix, pages)
                continue
            for index, page in enumerate(own, start=len(pages)):
                assert all(page not in other for other in (*(each[1] for each in live), *served)), "a page in use"
                content[page] = salt, tokens[: 2 * index + 2]
            live.append((tokens, pages + own, prefix, 0))
        elif act < 0.5:
            served.append(cache.serve_prefix(weak(page_hashes(tokens, 2, salt=salt), bits)))
            if not bits:
                assert all(content[page] == (salt, tokens[: 2 * i + 2]) for i, page in enumerate(served[-1]))
        elif act < 0.55 and served:
            cache.take_back(served.pop())
        elif live:
            index = rng.randrange(len(live))
            tokens, pages, prefix, published = live[index]
            if published:
                cache.unpublish(prefix, pages)
                del live[index]
                continue
            if act < 0.7 or act >= 0.9:
                blocks = weak(page_hashes(tokens, 2, salt=prefix.salt), bits)
                cache.insert(prefix, tokens, pages[: rng.randint(0, len(pages))], blocks)
            if rng.random() < 0.5:
                cache.keep(prefix, rng.choice((60, 300)))
            if act >= 0.8:
                cache.publish(pages)
                cache.hold(prefix, pages)
                live[index] = (tokens, pages, prefix, 1)
            elif act >= 0.6:
                cache.release(prefix, pages)
                del live[index]
        if change := cache.changes.take():
            assert set(change.removed) <= told and not set(change.stored) & told
            told = (told - set(change.removed)) | set(change.stored)
        assert told == cache._tree._by_block.keys()
        cache.check()
    for _, pages, prefix, published in live:
        (cache.unpublish if published else cache.release)(prefix, pages)
    for pages in served:
        cache.take_back(pages)
    cache.check()
    cache.flush()
    assert cache.pool.num_free == cache.pool.total


LAYOUT = KvLayout(
    page_size=4, num_layers=3, dtype="bfloat16", latent_width=6, rope_width=2, model_hash="m", canary=True
)


@pytest.mark.parametrize("make", [lambda: KvPool.create(LAYOUT, 5, "cpu"), lambda: KvPool(LAYOUT, 5)])
def test_canaries_and_scrubbing_touch_their_pages_only(make):
    pool = make()
    words = np.array([[1, 0, 0, 9, 2], [2**63 + 5, 1, 2, 3, 4]], np.uint64)
    pool.write_canaries(np.array([1, 3]), words)
    assert pool.read_canaries(np.array([[3, 1]])).tolist() == [[words[1].tolist(), words[0].tolist()]]
    pool.scrub([1])
    assert pool.read_canaries(np.array([1]))[0, 0] == 2**64 - 1
    assert pool.read_canaries(np.array([3])).tolist() == [words[1].tolist()]
    assert pool.nbytes == 5 * LAYOUT.page_bytes == len(pool.buffer) and pool.address > 0


def test_page_is_one_contiguous_block_of_the_view():
    pool = KvPool.create(LAYOUT, 5, "cpu")
    view = pool.view()
    assert view.shape == (5, 3, 4, 8) and view[1].is_contiguous()
    view[2] = 1.0
    page = pool.buffer.view(5, -1)[2, : LAYOUT.kv_bytes].view(torch.bfloat16)
    assert bool((page == 1).all()) and float(view.float().sum()) == page.numel()
    pool.scrub([2])
    assert bool(view[2].isnan().all()) and not bool(view[3].isnan().any())


def test_index_keys_make_a_page_some_rows_longer():
    layout = msgspec.structs.replace(LAYOUT, index_row_bytes=5)
    row, used = 16, LAYOUT.page_bytes + 3 * 4 * 5
    assert layout.page_bytes % row == 0 and used <= layout.page_bytes < used + row
    pool = KvPool.create(layout, 5, "cpu")
    view = pool.view()
    assert view.shape == (5, 3, 4, 8) and view.stride(0) * 2 == layout.page_bytes
    view.zero_()
    pool.write_canaries(np.array([1]), np.array([[7, 0, 0, 0, 8]], np.uint64))
    assert not bool(view.any()) and pool.canary_table()[1].tolist() == [7, 0, 0, 0, 8]


def test_fingerprint_depends_on_every_field():
    changes = {
        "page_size": 8,
        "num_layers": 4,
        "dtype": "float16",
        "latent_width": 7,
        "rope_width": 3,
        "index_row_bytes": 4,
        "layout_id": "x",
        "canary": False,
        "model_hash": "n",
        "protocol_version": KV_PROTOCOL + 1,
    }
    fields = {name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__}
    assert set(changes) == set(fields)
    prints = {KvLayout(**{**fields, name: value}).fingerprint for name, value in changes.items()}
    assert len(prints | {LAYOUT.fingerprint}) == len(changes) + 1
