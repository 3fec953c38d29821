import msgspec
import pytest
from millrace_common.page_hash import page_hashes
from millrace_common.reasons import Reason
from millrace_serve.engine.core import Failure, FinishReason, KvChunk, RequestId, SequenceOutput, TokenOutput
from millrace_serve.transfer.importer import (
    Action,
    AskRelease,
    AskReserve,
    Done,
    ImportState,
    KvImport,
    Over,
    Refusal,
)
from millrace_serve.transfer.messages import ReadPages
from millrace_testing.blocks import block

ID = RequestId(11, 2)
HASHES = page_hashes(list(range(64 * 4 + 5)))  # 5 pages, the last one partial
FIRST = SequenceOutput(ID, 0, [TokenOutput(42)])
FINAL = msgspec.structs.replace(FIRST, finish=FinishReason.STOP)
CANCELLED = Failure("CANCELLED", "the client went away")


def chunk(start: int, end: int, hashes: list[int] = HASHES, first: SequenceOutput = FIRST) -> KvChunk:
    last = end == len(HASHES)
    tokens = 261 if last else 64 * end
    pages = list(range(100 + start, 100 + end))
    return KvChunk(ID, start, pages, hashes[start:end], tokens, last, first if last else None)


def reading(num_cached_pages: int = 0) -> KvImport:
    """An import whose first two pages are published and whose own pages are 10 to 14."""
    x = KvImport(ID, HASHES)
    assert x.on_chunk(chunk(0, 2)) == [AskReserve()]
    x.on_reserved(range(10, 15), num_cached_pages)
    return x


def test_parts_are_read_as_they_arrive() -> None:
    x = KvImport(ID, HASHES)
    assert x.on_chunk(chunk(0, 2)) == [AskReserve()]
    assert x.on_chunk(chunk(2, 3)) == []
    assert x.on_reserved(range(10, 15), 0) == [ReadPages(ID, 0, [100, 101, 102], [10, 11, 12])]
    assert x.on_chunk(chunk(3, 5)) == [ReadPages(ID, 1, [103, 104], [13, 14])]
    assert x.on_read_done(1) == []
    assert x.on_read_done(0) == [AskRelease()]
    assert x.on_release_confirmed() == [Done(FIRST)]
    assert x.state is ImportState.DONE and x.failure is None and not x.refused


OFFER = KvChunk(ID, 0, [], [], 0, False)


def test_pages_are_reserved_before_there_is_anything_to_read() -> None:
    x = KvImport(ID, HASHES)
    assert x.on_chunk(OFFER) == [AskReserve()]
    assert x.on_chunk(OFFER) == []
    assert x.on_reserved(range(10, 15), 1) == []
    assert x.on_chunk(chunk(0, 5)) == [ReadPages(ID, 0, [101, 102, 103, 104], [11, 12, 13, 14])]
    assert x.on_read_done(0) == [AskRelease()]


@pytest.mark.parametrize(("offer", "reserved"), [(OFFER, False), (OFFER, True), (chunk(0, 2), False)])
def test_offer_that_is_given_up_is_given_back(offer: KvChunk, reserved: bool) -> None:
    x = KvImport(ID, HASHES)
    x.on_chunk(offer)
    if reserved:
        x.on_reserved(range(10, 15), 0)
    assert x.on_abort(CANCELLED) == [AskRelease(), Over(CANCELLED)]
    assert x.on_reserved(range(10, 15), 0) == [] and x.refused == {Refusal.LATE: 1}


@pytest.mark.parametrize("cached", range(6))
def test_cached_pages_are_not_read(cached: int) -> None:
    x = KvImport(ID, HASHES)
    x.on_chunk(chunk(0, 2))
    actions = x.on_reserved(range(10, 15), cached) + x.on_chunk(chunk(2, 5))
    reads = [a for a in actions if isinstance(a, ReadPages)]
    pairs = [pair for r in reads for pair in zip(r.src_pages, r.dst_pages, strict=True)]
    assert pairs == [(100 + i, 10 + i) for i in range(cached, 5)]
    for r in reads:
        actions = x.on_read_done(r.read)
    assert actions == [AskRelease()]


def test_what_does_not_fit_is_refused_and_counted() -> None:
    x = reading()
    assert x.on_chunk(chunk(0, 2)) == []
    assert x.on_chunk(chunk(1, 3)) == []  # overlaps: not a new chunk either
    assert x.on_chunk(chunk(3, 5)) == []
    assert x.on_reserved(range(5), 0) == []
    assert x.on_release_confirmed() == []
    assert x.refused == {Refusal.DUPLICATE_CHUNK: 2, Refusal.CHUNK_GAP: 1, Refusal.LATE: 2}
    assert x.state is ImportState.READING
    assert x.on_chunk(chunk(2, 5)) == [ReadPages(ID, 1, [102, 103, 104], [12, 13, 14])]
    assert x.on_chunk(chunk(2, 5)) == [] and x.refused[Refusal.LATE] == 3, "nothing follows the last one"


def over(actions: list[Action]) -> Failure:
    assert isinstance(actions[-1], Over)
    return actions[-1].failure


def test_other_tokens_fail_the_import() -> None:
    other = page_hashes([*range(64 * 2), 999, *range(64 * 2 + 1, 64 * 4 + 5)])
    x = reading(num_cached_pages=2)
    failure = over(x.on_chunk(chunk(2, 5, hashes=other)))
    assert failure.reason == "KV_MISMATCH" and "page 2 " in failure.message


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (KvChunk(ID, 2, [1, 2], HASHES[2:3], 256, False), "2 pages but 1 fingerprints"),
        (KvChunk(ID, 2, [1, 2, 3, 4], [*HASHES[2:], block(0)], 320, False), "ends at page 6, the prompt has 5"),
        (KvChunk(ID, 2, [1], HASHES[2:3], 192, True, FIRST), "last chunk ends at page 3 of 5"),
        (KvChunk(ID, 2, [1, 2, 3], HASHES[2:], 261, True, None), "without a first token"),
    ],
)
def test_part_that_contradicts_itself_fails_the_import(bad: KvChunk, message: str) -> None:
    failure = over(reading(num_cached_pages=2).on_chunk(bad))
    assert failure.reason == "KV_MISMATCH" and message in failure.message


def test_pages_are_not_given_up_while_reads_are_in_flight() -> None:
    x = reading()
    x.on_chunk(chunk(2, 3))
    assert x._outstanding == {0, 1}
    assert x.on_abort(CANCELLED) == []
    assert x.state is ImportState.DRAINING and x.failure == CANCELLED
    assert x.on_chunk(chunk(3, 5)) == []
    assert x.on_read_done(0, "too late to matter") == []
    assert x.on_read_done(1) == [AskRelease(), Over(CANCELLED)]


@pytest.mark.parametrize(("corrupt", "reason"), [(False, "TRANSFER_FAILED"), (True, "KV_MISMATCH")])
def test_failed_read_fails_the_import_when_the_others_are_final(corrupt: bool, reason: str) -> None:
    x = reading()
    x.on_chunk(chunk(2, 3))
    assert x.on_read_done(0, "the peer died", corrupt) == []
    failure = over(x.on_read_done(1))
    assert failure.reason == reason and "the peer died" in failure.message


def test_pages_that_were_not_held_are_discarded() -> None:
    """The stream ends with an error then. One that ends without an answer proves nothing either."""
    expired = Failure("KV_EXPIRED", "")
    for end in (lambda x: x.on_abort(expired), KvImport.on_stream_end):
        x = reading()
        x.on_read_done(0)
        x.on_chunk(chunk(2, 5))
        assert x.on_read_done(1) == [AskRelease()]
        [ended] = end(x)
        assert ended == Over(expired) or "5 of 5 pages, releasing" in ended.failure.message


def test_abort_before_anything_arrived_gives_nothing_back() -> None:
    assert KvImport(ID, HASHES).on_abort(CANCELLED) == [Over(CANCELLED)]


def test_abort_while_releasing_does_not_release_again() -> None:
    x = reading(num_cached_pages=2)
    for action in x.on_chunk(chunk(2, 5)):
        assert isinstance(action, ReadPages)
        assert x.on_read_done(action.read) == [AskRelease()]
    assert x.on_abort(CANCELLED) == [Over(CANCELLED)]
    assert x.on_release_confirmed() == []


def test_a_stream_that_ends_early_fails_the_import() -> None:
    x = reading(num_cached_pages=2)
    failure = over(x.on_stream_end())
    assert failure.reason == "TRANSFER_FAILED" and "2 of 5 pages" in failure.message


def test_stream_that_ends_after_the_last_part_proves_nothing() -> None:
    x = reading()
    x.on_chunk(chunk(2, 5))
    assert x.on_stream_end() == [] and x.state is ImportState.DRAINING
    assert x.on_read_done(0) == []
    assert over(x.on_read_done(1)).reason == "TRANSFER_FAILED"


@pytest.mark.parametrize(("ends", "error"), [(True, ""), (False, "the peer has gone")], ids=["stream", "read"])
def test_stream_or_read_may_end_when_the_first_token_was_the_last(ends: bool, error: str) -> None:
    """The exporter has taken the pages back by then, and may have ended."""
    x = reading()
    x.on_chunk(chunk(2, 5, first=FINAL))
    assert not ends or x.on_stream_end() == []
    assert isinstance(x.on_read_done(0, error)[0], Done)


def test_terminal_states_absorb_everything() -> None:
    x = KvImport(ID, HASHES)
    x.on_abort(CANCELLED)
    events = [
        x.on_abort(Failure("INTERNAL", "later")),
        x.on_chunk(chunk(0, 2)),
        x.on_stream_end(),
        x.on_reserved(range(5), 0),
        x.on_release_confirmed(),
    ]
    assert events == [[]] * 5
    assert x.state is ImportState.OVER and x.failure == CANCELLED


def test_reasons_are_in_the_error_table() -> None:
    assert {"KV_MISMATCH", "TRANSFER_FAILED", "KV_EXPIRED"} <= set(Reason.__members__)


@pytest.mark.parametrize("state", ["waiting", "reserving", "reading", "in flight"])
def test_first_token_that_is_final_needs_no_more_reads_and_no_release(state: str) -> None:
    x = KvImport(ID, HASHES)
    read = None
    if state != "waiting":
        x.on_chunk(chunk(0, 2))
    if state in ("reading", "in flight"):
        (read,) = x.on_reserved(range(10, 15), 0)
    if state == "reading":
        assert x.on_read_done(read.read) == []
    actions = x.on_chunk(chunk(0 if state == "waiting" else 2, 5, first=FINAL))
    if state == "in flight":
        assert actions == []
        actions = x.on_read_done(read.read)
    assert actions == [Done(FINAL)]
    assert x.state is ImportState.DONE
