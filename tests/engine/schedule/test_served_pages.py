"""Cached prefixes that engines serve and fetch, with the test as the worker in between."""

import pytest
from engine.harness import Driver, canaries, fill_pages, request
from millrace_common.page_hash import page_hashes
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import (
    Abort,
    Failure,
    FinishReason,
    FlushCache,
    KvArrived,
    KvFailed,
    KvLate,
    KvOffered,
    LeaseEnded,
    RequestId,
    Route,
    ServePrefix,
)
from millrace_serve.engine.schedule.sequence import Phase

PROMPT = list(range(20, 34))  # 14 tokens: 3 full pages of 4, and 2 tokens
BLOCKS = page_hashes(PROMPT[:12], 4)
ID, PREFIX_FETCH = RequestId(1, 0), RequestId(0, 1)
LOST = Failure("WORKER_LOST", "the source has gone")


def fetcher(prompt: list[int] = PROMPT, role: Role = Role.PREFILL, **config: object) -> Driver:
    driver = Driver(role, **config)
    driver.run(request(1, prompt, Route.EXPORT, fetches_prefix=True))
    assert not driver.reserved
    return driver


def pages_of(driver: Driver, id: RequestId = ID) -> list[int]:
    return [page for part in driver.parts[id] for page in part.page_ids]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_pages", [1, 3])
def test_fetched_pages_are_not_computed(num_pages: int, overlap: bool) -> None:
    driver = fetcher(overlap=overlap)
    driver.run(KvOffered(ID, num_pages))
    reserved = driver.reserved[ID]
    assert len(reserved.page_ids) == num_pages and reserved.num_cached_pages == 0
    assert pages_of(driver) == []  # only the offer: the decode worker reserves its pages
    assert (driver.engine.load().running, driver.engine.load().importing) == (0, 1)
    fill_pages(driver, reserved.page_ids, PROMPT[: 4 * num_pages], 0)
    driver.run(KvArrived(ID))
    assert pages_of(driver)[:num_pages] == reserved.page_ids
    assert driver.engine.load().counters["cached_tokens"] == 4 * num_pages
    driver.finish_all()


@pytest.mark.parametrize("when", ["unanswered", "offered", "reserved"])
def test_prefix_fetch_that_fails_is_computed(when: str) -> None:
    driver = fetcher()
    if when != "unanswered":
        driver.tell(KvOffered(ID, 2))
    if when == "reserved":
        driver.run()
    driver.run(KvFailed(ID, LOST))
    assert driver.parts[ID][-1].first is not None and driver.engine.load().counters["cached_tokens"] == 0
    driver.finish_all()


def test_reads_that_end_late_write_where_nobody_computes() -> None:
    driver = fetcher(num_pages=9)
    driver.run(KvOffered(ID, 3))
    pages = driver.reserved[ID].page_ids
    driver.run(KvLate(ID))
    assert driver.parts[ID][-1].first is not None and not set(pages) & set(pages_of(driver))
    assert driver.engine.load().counters["prompt_tokens"] == len(PROMPT), "though it was admitted twice"
    driver.run(LeaseEnded(ID))
    assert ID not in driver.here.live and driver.engine.load().pages_published == 3
    driver.run(request(2, [50] * 18, Route.EXPORT))  # fills the pool but for these pages
    fill_pages(driver, pages, [7] * 12, 0)
    assert driver.parts[RequestId(2, 0)][-1].first is not None
    driver.tell(KvFailed(ID, LOST))
    driver.finish_all()


def test_prompt_without_room_beside_a_late_read_waits_for_it() -> None:
    driver = fetcher(num_pages=6)
    driver.run(KvOffered(ID, 3))
    driver.run(KvLate(ID))
    assert driver.here.live[ID].phase is Phase.WAITING and not driver.engine.has_work()
    driver.run(KvFailed(ID, LOST))
    assert driver.parts[ID][-1].first is not None
    driver.finish_all()


@pytest.mark.parametrize("when", ["unanswered", "offered", "reserved", "late", "late after it"])
def test_abort_keeps_the_pages_until_the_reads_are_over(when: str) -> None:
    """That may take as long as a lost worker likes, so streams that need pages are preempted meanwhile. One that is
    known to be late keeps the pages that it reads, and not the engine's only slot.
    """
    driver = fetcher(role=Role.FLEXIBLE, max_running=1 if "late" in when else 2)
    if when != "unanswered":
        driver.tell(KvOffered(ID, 2))
    if when not in ("unanswered", "offered"):
        driver.run()
    ends = [Abort(ID)] if "late" not in when else [KvLate(ID), Abort(ID)]
    for end in reversed(ends) if when == "late after it" else ends:
        driver.tell(end)
    driver.run(*(request(room, [20 + room] * 8, max_tokens=20) for room in (2, 3)))  # 7 pages each
    assert driver.finish[ID].finish is FinishReason.ABORT and len(driver.finish) == 3
    kept = {"reserved": (4, 0), "late": (0, 2), "late after it": (0, 2)}.get(when, (0, 0))
    assert (driver.engine.load().pages_running, driver.engine.load().pages_published) == kept
    driver.tell(KvFailed(ID, LOST))
    driver.parts.clear()
    driver.finish_all()


@pytest.mark.parametrize(("own", "pages", "cached"), [(9, 2, 2), (5, 3, 1)])
def test_only_the_pages_that_we_lack_are_filled(own: int, pages: int, cached: int) -> None:
    """An engine that computed `own` tokens of PROMPT itself is offered leading `pages` of it."""
    driver = Driver(Role.PREFILL)
    driver.run(request(2, PROMPT[:own], Route.EXPORT))
    driver.run(request(1, PROMPT, Route.EXPORT, fetches_prefix=True), KvOffered(ID, pages))
    reserved = driver.reserved[ID]
    assert (reserved.num_cached_pages, len(reserved.page_ids)) == (cached, pages)
    fill_pages(driver, reserved.page_ids, PROMPT[: 4 * pages], cached)
    driver.run(KvArrived(ID))
    assert driver.engine.load().counters["cached_tokens"] == 4 * pages
    driver.finish_all()


@pytest.fixture(params=[Role.UNIFIED, Role.DECODE, Role.PREFILL])
def prefix_source(request: pytest.FixtureRequest) -> Driver:
    """Its prefix cache has PROMPT's full pages."""
    return with_prompt(request.param)


def with_prompt(role: Role, **config: object) -> Driver:
    driver = Driver(role, **config)
    driver.run(request(7, PROMPT, Route.EXPORT if role is Role.PREFILL else Route.LOCAL, max_tokens=3))
    driver.run(LeaseEnded(RequestId(7, 0)))
    assert driver.engine.load().pages_cached >= 3
    return driver


@pytest.mark.parametrize(
    ("blocks", "found"), [(BLOCKS, 3), (BLOCKS[:1], 1), ([*BLOCKS[:2], 5], 2), ([5], 0), (BLOCKS[1:], 0), ([], 0)]
)
def test_longest_leading_run_is_served(prefix_source: Driver, blocks: list[int], found: int) -> None:
    prefix_source.run(ServePrefix(PREFIX_FETCH, blocks))
    part = prefix_source.served[PREFIX_FETCH]
    assert part.last and part.first is None and part.fingerprints == BLOCKS[:found] and part.num_tokens == 4 * found
    assert prefix_source.engine.load().pages_published == found
    prefix_source.run(FlushCache(), LeaseEnded(PREFIX_FETCH))
    assert prefix_source.engine.load().pages_published == 0
    prefix_source.check_whole()


def test_served_pages_are_not_evicted_and_are_bounded() -> None:
    prefix_source = with_prompt(Role.UNIFIED, num_pages=9)
    for prefix_fetch in range(1, 4):
        prefix_source.tell(ServePrefix(RequestId(0, prefix_fetch), BLOCKS))
    prefix_source.run()
    assert [len(prefix_source.served[RequestId(0, prefix_fetch)].page_ids) for prefix_fetch in range(1, 4)] == [2, 0, 0]
    prefix_source.run(request(8, [90] * 24, max_tokens=1))  # six of eight pages
    assert prefix_source.finish[RequestId(8, 0)].finish is FinishReason.LENGTH
    words = prefix_source.engine.pool.read_canaries(prefix_source.served[PREFIX_FETCH].page_ids)
    assert words.tolist() == canaries(PROMPT[:8], 4).tolist()
    prefix_source.run(LeaseEnded(PREFIX_FETCH), ServePrefix(RequestId(0, 4), BLOCKS))
    assert len(prefix_source.served[RequestId(0, 4)].page_ids) == 2
    prefix_source.run_out(LeaseEnded(RequestId(0, 4)))
