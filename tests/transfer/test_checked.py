"""Checksums of pages: one bit that changes anywhere on the way to another worker fails the read and no other."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from millrace_kernels.page_sum import page_sums
from millrace_serve.engine.cache.kv_pool import ITEM_BYTES, SUMMED, KvLayout, KvPool
from millrace_serve.engine.step.page_sums import PageSums
from millrace_serve.transfer.base import PageBuffer, ReadOp, ReadState
from millrace_serve.transfer.checked import CheckedSink
from millrace_testing.examples import examples
from millrace_testing.local_transfer import LocalFabric, LocalSink, LocalSource

PAGES = 6
CPU = torch.device("cpu")


def layout(dtype: str, index_row_bytes: int = 0) -> KvLayout:
    return KvLayout(
        page_size=4, num_layers=3, dtype=dtype, latent_width=16, rope_width=8, model_hash="m",
        index_row_bytes=index_row_bytes, layout_id=SUMMED,
    )  # fmt: skip


def filled(of: KvLayout) -> KvPool:
    """A pool whose pages have random bytes and their checksums."""
    pool = KvPool.create(of, PAGES, CPU)
    pool.rows[:, : of.kv_bytes] = np.random.default_rng(1).integers(0, 256, (PAGES, of.kv_bytes), np.uint8)
    PageSums(pool).write(torch.arange(PAGES))
    return pool


def buffer(pool: KvPool) -> PageBuffer:
    return PageBuffer(pool.address, pool.layout.page_bytes, pool.num_pages)


class Link:
    """Two pools, and a read that has not been polled yet."""

    def __init__(self, of: KvLayout) -> None:
        self.theirs, self.ours, fabric = filled(of), KvPool.create(of, PAGES, CPU), LocalFabric()
        self.handle = LocalSource(fabric, buffer(self.theirs)).handle()
        self.sink = CheckedSink(LocalSink(fabric, buffer(self.ours)), PageSums(self.ours).wrong)
        self.sink.connect(self.handle)

    def read(self, source: Sequence[int], ours: Sequence[int]) -> ReadOp:
        return self.sink.read(self.handle, source, ours)


@pytest.mark.parametrize("index_row_bytes", [0, 20])
@pytest.mark.parametrize("dtype", ITEM_BYTES)
def test_every_bit_of_a_page_counts(dtype: str, index_row_bytes: int) -> None:
    link = Link(layout(dtype, index_row_bytes))
    bits = np.random.default_rng(2).choice(link.theirs.rows[2, : link.theirs.layout.kv_bytes + 48].size * 8, 40)
    assert link.read([1, 2], [3, 4]).poll() is ReadState.DONE
    for bit in bits.tolist():
        if not (link.theirs.layout.kv_bytes <= bit // 8 < link.theirs.layout.kv_bytes + 40):  # words of the canary
            link.theirs.rows[2, bit // 8] ^= 1 << bit % 8
            broken, whole = link.read([1, 2], [3, 4]), link.read([0, 5], [1, 2])
            assert (broken.poll(), whole.poll()) == (ReadState.FAILED, ReadState.DONE)
            assert broken.corrupt and "1 pages changed on the way: [4]" in broken.error
            assert broken.poll() is ReadState.FAILED, "final states stay"
            link.theirs.rows[2, bit // 8] ^= 1 << bit % 8
    assert link.read([1, 2], [3, 4]).poll() is ReadState.DONE


def test_failed_read_is_not_checked() -> None:
    link = Link(layout("bfloat16"))
    read = link.read([1], [2])
    link.sink.close()
    assert read.poll() is ReadState.FAILED and not read.corrupt and "closed" in read.error


@examples(60)
@given(
    words=st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1, max_size=40),
    change=st.integers(1, 2**32 - 1),
    place=st.integers(0, 39),
)
def test_a_word_that_changes_changes_the_sum(words: list[int], change: int, place: int) -> None:
    page = torch.tensor(words, dtype=torch.int32)
    other = page.clone()
    other[place % len(words)] ^= torch.tensor(change, dtype=torch.int64).to(torch.int32)
    one, two = page_sums(torch.stack((page, other)), torch.arange(2), len(words)).tolist()
    assert one != two
    expected = sum(word * (2 * index + 1) for index, word in enumerate(words)) % 2**64
    assert one % 2**64 == expected
