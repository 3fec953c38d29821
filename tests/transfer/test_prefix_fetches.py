"""The import machine as a fetching worker: one chunk, perhaps shorter than what was asked for, and no first token."""

import pytest
from millrace_common.page_hash import page_hashes
from millrace_common.reasons import Reason
from millrace_serve.engine.core import Failure, KvChunk, RequestId, SequenceOutput, TokenOutput
from millrace_serve.transfer.importer import AskRelease, AskReserve, Done, ImportState, KvImport, Over
from millrace_serve.transfer.messages import ReadPages
from millrace_testing.blocks import block

ID = RequestId(11, 2)
HASHES = page_hashes(list(range(64 * 5)))
LATE = Failure("STALLED", "too late")


def served(count: int, last: bool = True, first: SequenceOutput | None = None) -> KvChunk:
    return KvChunk(ID, 0, list(range(100, 100 + count)), HASHES[:count], 64 * count, last, first)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_what_is_there_is_read_and_proved(count: int) -> None:
    x = KvImport(ID, HASHES, prefix_fetch=True)
    assert x.on_chunk(served(count)) == [AskReserve()] and x.num_offered == count
    pages = list(range(10, 10 + count))
    assert x.on_reserved(pages, 0) == [ReadPages(ID, 0, list(range(100, 100 + count)), pages)]
    assert x.on_read_done(0) == [AskRelease()]
    assert x.on_release_confirmed() == [Done(None)]


def test_what_we_have_ourselves_is_only_given_back() -> None:
    x = KvImport(ID, HASHES, prefix_fetch=True)
    x.on_chunk(served(3))
    assert x.on_reserved([10, 11, 12], 3) == [AskRelease()]
    assert x.on_release_confirmed() == [Done(None)]


def test_prefix_source_without_a_page_holds_nothing() -> None:
    x = KvImport(ID, HASHES, prefix_fetch=True)
    [over] = x.on_chunk(served(0))
    assert isinstance(over, Over) and over.failure.reason == Reason.KV_NOT_FOUND


@pytest.mark.parametrize(
    "bad",
    [
        KvChunk(ID, 0, [100, 101], [HASHES[0], block(7)], 128, True),
        KvChunk(ID, 0, [100] * 6, [*HASHES, block(7)], 384, True),
        served(2, last=False),  # others would follow pages that are reserved by then
        served(5, first=SequenceOutput(ID, 0, [TokenOutput(1)])),
    ],
)
def test_part_that_is_no_start_of_our_prompt_is_not_read(bad: KvChunk) -> None:
    x = KvImport(ID, HASHES, prefix_fetch=True)
    release, over = x.on_chunk(bad)
    assert release == AskRelease() and isinstance(over, Over) and over.failure.reason == Reason.KV_MISMATCH


def test_prefix_fetch_that_takes_too_long_keeps_its_pages_until_the_read_ends() -> None:
    x = KvImport(ID, HASHES, prefix_fetch=True)
    x.on_chunk(served(2))
    x.on_reserved([10, 11], 1)
    assert x.on_abort(LATE) == [] and x.state is ImportState.DRAINING
    assert x.on_read_done(0) == [AskRelease(), Over(LATE)]


def test_stream_that_ends_before_the_part_fails_the_prefix_fetch() -> None:
    [over] = KvImport(ID, HASHES, prefix_fetch=True).on_stream_end()
    assert isinstance(over, Over) and over.failure.reason == Reason.TRANSFER_FAILED
