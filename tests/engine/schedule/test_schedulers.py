"""Scheduling decisions, one by one."""

import msgspec
import pytest
from engine.harness import Driver, fill_pages, first_output, request
from millrace_common.page_hash import page_hashes
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import (
    Abort,
    Failure,
    FinishReason,
    KvArrived,
    KvFailed,
    KvOffered,
    LeaseEnded,
    Request,
    RequestId,
    Route,
    Submit,
)

PROMPT = list(range(20, 30))  # 10 tokens: 3 pages of 4


def import_all(driver: Driver, *rooms: int) -> None:
    for room in rooms:
        driver.tell(KvOffered(RequestId(room, 0)))
    driver.step()
    for room in rooms:
        id = RequestId(room, 0)
        reserved = driver.reserved.pop(id)
        fill_pages(driver, reserved.page_ids, driver.requests[id].token_ids, reserved.num_cached_pages)
        first = first_output(driver, id)
        driver.arrived[id] = first.tokens[0].token_id
        driver.tell(KvArrived(id, first))


@pytest.fixture(params=[True, False], ids=["overlap", "synchronous"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


# ---------------------------------------------------------------------------------------------- decode


def test_chunks_share_steps_with_decoding(overlap):
    driver = Driver(Role.UNIFIED, overlap=overlap, max_prefill_tokens=4)
    driver.step(request(1, [20], max_tokens=8))
    driver.submit(request(2, PROMPT, max_tokens=2))
    plan = driver.engine._scheduler.schedule()
    assert [seq.id.room for seq in plan.decode] == [1]
    assert [(chunk.start, chunk.end, chunk.samples) for chunk in plan.chunks] == [(0, 4, False)]


def test_order_is_priority_then_arrival_and_nobody_is_skipped():
    driver = Driver(Role.UNIFIED, num_pages=9, max_running=3, max_prefill_tokens=100, overlap=False)
    driver.step(request(1, PROMPT * 2, max_tokens=8))  # 5 pages of 8
    driver.submit(request(2, [21] * 20, max_tokens=1))  # 5 pages: does not fit, and must not be overtaken
    driver.step(request(3, [22], max_tokens=1))
    assert driver.engine.load().running == 1 and driver.engine.load().capacity == 0
    driver.step(request(4, [23], max_tokens=1, priority=1))
    assert RequestId(4, 0) in driver.finish and RequestId(3, 0) not in driver.finish
    driver.run()
    assert list(driver.finish) == [RequestId(room, 0) for room in (4, 1, 2, 3)]
    assert driver.engine.load().capacity > 0
    driver.check_whole()


def test_preemption_takes_the_last_to_arrive_of_the_lowest_priority(overlap):
    driver = Driver(Role.DECODE, num_pages=9, overlap=overlap, prefix_cache=False, max_prefill_tokens=100)
    for room, priority in ((1, 0), (2, 1), (3, 0)):
        driver.submit(request(room, [20 + room] * 7, Route.IMPORT, max_tokens=8, priority=priority))
    import_all(driver, 1, 2, 3)
    seqs = {id.room: seq for id, seq in driver.here.live.items()}
    while not driver.engine.load().counters["preemptions"]:
        driver.step()
    assert seqs[3].slot == -1 or seqs[3].inflight
    assert seqs[1].slot >= 0 and seqs[2].slot >= 0
    driver.run()
    assert [driver.finish[RequestId(room, 0)].finish for room in (1, 2, 3)] == [FinishReason.LENGTH] * 3
    driver.check_whole()


def test_prompt_preempted_on_its_way_counts_no_cached_or_recomputed_token(overlap):
    """Its own pages lie in the prefix cache meanwhile; nobody else has computed a token of it."""
    driver = Driver(Role.UNIFIED, num_pages=9, max_prefill_tokens=2, overlap=overlap)
    driver.submit(request(1, [21] * 4, max_tokens=16, priority=1), request(2, [*range(30, 50)], max_tokens=1))
    outputs = []
    while driver.engine.has_work():
        outputs += driver.step().outputs
    load = driver.engine.load()
    assert load.counters["preemptions"] == 1 and load.counters["prompt_tokens"] == 24
    assert (load.counters["resumed"], load.counters["recomputed"]) == (1, 0)
    assert load.counters["cached_tokens"] == 0 and all(output.found.cached_tokens == 0 for output in outputs)
    driver.check_whole()


def test_reserved_pages_name_the_cached_ones():
    driver = Driver(Role.DECODE, overlap=False)
    driver.submit(request(1, PROMPT, Route.IMPORT, max_tokens=3))
    import_all(driver, 1)
    driver.run()
    driver.submit(request(2, [*PROMPT[:8], 99], Route.IMPORT, max_tokens=3))
    driver.step(KvOffered(RequestId(2, 0)))
    reserved = driver.reserved[RequestId(2, 0)]
    assert reserved.num_cached_pages == 2 and len(reserved.page_ids) == 3


def test_no_pages_no_reservation_until_some_are_free():
    driver = Driver(Role.DECODE, num_pages=6, overlap=False)
    for room in (1, 2):
        driver.submit(request(room, [20 + room] * 12, Route.IMPORT, max_tokens=2))
        driver.tell(KvOffered(RequestId(room, 0)))
    driver.run()
    assert set(driver.reserved) == {RequestId(1, 0)}
    assert driver.engine.load().capacity == 0 and not driver.engine.has_work()
    driver.run(KvFailed(RequestId(1, 0), Failure("TRANSFER_FAILED", "gone")))
    assert RequestId(2, 0) in driver.reserved
    assert driver.finish[RequestId(1, 0)].error == Failure("TRANSFER_FAILED", "gone")


def test_abort_during_transfer_keeps_the_pages_until_it_is_over():
    driver = Driver(Role.DECODE)
    driver.submit(request(1, PROMPT, Route.IMPORT))
    id = RequestId(1, 0)
    driver.step(KvOffered(id))
    driver.run(Abort(id))
    assert driver.finish[id].finish is FinishReason.ABORT
    assert driver.engine.load().pages_running == 3
    driver.run_out(KvFailed(id, Failure("CANCELLED", "aborted")))


@pytest.mark.parametrize("offered", [False, True])
def test_first_token_that_was_the_last_needs_no_pages(offered):
    driver, id = Driver(Role.DECODE, num_pages=6), RequestId(2, 0)
    driver.submit(request(1, [21] * 12, Route.IMPORT), request(2, PROMPT, Route.IMPORT, max_tokens=1))
    for room in (1, 2)[: 1 + offered]:
        driver.tell(KvOffered(RequestId(room, 0)))
    driver.run()
    assert driver.engine.load().waiting_tokens == offered * len(PROMPT) and id not in driver.reserved
    first = first_output(driver, id)
    driver.arrived[id] = first.tokens[0].token_id
    driver.run(KvArrived(id, first))
    output = driver.finish[id]
    assert (output.first_index, output.tokens, output.finish) == (1, [], FinishReason.LENGTH)
    assert driver.engine.load().waiting_tokens == 0


def test_corrupt_pages_fail_their_request_and_nobody_else(overlap):
    driver = Driver(Role.DECODE, overlap=overlap)
    for room in (1, 2):
        driver.submit(request(room, [20 + room] * 10, Route.IMPORT, max_tokens=5))
    import_all(driver, 1, 2)
    page = driver.here.live[RequestId(1, 0)].pages[1]
    fill_pages(driver, [page], [77] * 4, 0)
    driver.run()
    error = driver.finish[RequestId(1, 0)].error
    assert error.reason == "KV_MISMATCH" and f"KV page {page} (page 1 of request {RequestId(1, 0)})" in error.message
    assert driver.finish[RequestId(2, 0)].finish is FinishReason.LENGTH
    driver.check_whole()


@pytest.mark.parametrize("role", [Role.UNIFIED, Role.PREFILL])
def test_corrupt_page_leaves_the_prefix_cache_with_its_request(overlap, role):
    driver = Driver(role, overlap=overlap, max_prefill_tokens=100)
    route = Route.EXPORT if role is Role.PREFILL else Route.LOCAL

    def run(room: int) -> Failure | None:
        driver.run(request(room, PROMPT, route, max_tokens=2))
        driver.tell(LeaseEnded(RequestId(room, 0))) if role is Role.PREFILL else None
        driver.run()
        output = driver.finish.get(RequestId(room, 0))
        return output.error if output else None

    assert run(1) is None and driver.engine.load().pages_cached == 2
    [_, page] = [node.page for node in driver.cache._tree.match(PROMPT, 2, b"")]
    fill_pages(driver, [page], [77] * 4, 0)
    error = run(2)
    assert error is not None and error.reason == "KV_MISMATCH" and f"KV page {page} " in error.message
    assert run(3) is None
    driver.check_whole()


def test_imported_pages_that_no_step_has_used_are_not_shared():
    driver = Driver(Role.DECODE, overlap=False)
    driver.submit(request(1, PROMPT, Route.IMPORT))
    import_all(driver, 1)
    driver.run(Abort(RequestId(1, 0)))
    assert driver.engine.load().pages_cached == 0
    driver.check_whole()


def test_replay_counts_earlier_outputs():
    driver = Driver(Role.UNIFIED)
    whole = request(1, PROMPT, max_tokens=8, temperature=1.0, seed=5)
    driver.requests[whole.id] = whole
    expected = driver.expected(whole.id)
    replay = request(2, PROMPT + expected[:5], prior=5, max_tokens=8, temperature=1.0, seed=5)
    driver.run(replay)
    assert driver.tokens[replay.id] == expected


def test_after_a_deadline_the_next_one_is_that_of_an_active_request():
    driver = Driver(Role.UNIFIED)
    for room, timeout_s in enumerate((2.0, 3.0), start=1):
        driver.submit(request(room, PROMPT, max_tokens=1, timeout_s=timeout_s))
    driver.run()
    driver.submit(request(3, PROMPT, max_tokens=2, timeout_s=9.0))
    driver.clock.now = 2.5
    driver.step()
    assert driver.here.seconds_to_deadline() == 6.5  # the second request ended long before its own
    driver.run_out()


def test_deadline_passes_in_every_phase():
    driver = Driver(Role.DECODE, max_running=1)
    driver.submit(request(1, PROMPT, max_tokens=20, timeout_s=2.0))  # will run
    driver.submit(request(2, PROMPT, max_tokens=20, timeout_s=2.0))  # will wait
    driver.submit(request(3, PROMPT, Route.IMPORT, timeout_s=2.0))  # will never be offered
    driver.step()
    assert driver.here.seconds_to_deadline() == 2.0
    driver.clock.now = 2.5
    driver.run()
    assert {output.error.reason for output in driver.finish.values()} == {"DEADLINE_EXCEEDED"}
    assert len(driver.finish) == 3
    driver.check_whole()


# ---------------------------------------------------------------------------------------------- prefill


def test_parts_follow_the_chunks(overlap):
    driver = Driver(Role.PREFILL, overlap=overlap, max_prefill_tokens=6)
    driver.step(request(1, PROMPT, Route.EXPORT, max_tokens=5))
    # the offer comes while the first chunk is computed
    assert len(driver.parts[RequestId(1, 0)]) == (1 if overlap else 2)
    driver.run()
    offer, first, last = driver.parts[RequestId(1, 0)]
    assert (offer.page_ids, offer.num_tokens, offer.last) == ([], 0, False)
    assert (first.first_page, len(first.page_ids), first.num_tokens, first.last) == (0, 1, 4, False)
    assert (last.first_page, len(last.page_ids), last.num_tokens, last.last) == (1, 2, 10, True)
    assert first.fingerprints + last.fingerprints == page_hashes(PROMPT, 4)
    assert last.first is not None and last.first.finish is None
    assert driver.engine.load().exporting == 1 and driver.engine.load().pages_published == 3
    driver.run_out(LeaseEnded(RequestId(1, 0)))


def test_cached_pages_are_published_before_anything_is_computed():
    driver = Driver(Role.PREFILL, overlap=True)
    driver.run(request(1, PROMPT, Route.EXPORT))
    _, first, last = driver.parts[RequestId(1, 0)]
    driver.step(request(2, [*PROMPT[:8], 99], Route.EXPORT))
    (part,) = driver.parts[RequestId(2, 0)]
    assert (part.num_tokens, part.last) == (8, False)
    assert part.page_ids == first.page_ids + last.page_ids[:1]
    driver.run()
    assert driver.parts[RequestId(2, 0)][-1].first.found.cached_tokens == 8


def test_prompt_that_is_cached_whole_computes_its_last_page_again():
    """A first token needs the row of the last prompt token."""
    driver = Driver(Role.PREFILL)
    for room in (1, 2):
        driver.run(request(room, PROMPT[:8], Route.EXPORT))
    last = driver.parts[RequestId(2, 0)][-1]
    assert last.last and last.first.found.cached_tokens == 4


def test_first_token_that_ends_it_is_final_in_the_last_part():
    driver = Driver(Role.PREFILL)
    driver.run(request(1, PROMPT, Route.EXPORT, max_tokens=1))
    assert driver.parts[RequestId(1, 0)][-1].first.finish is FinishReason.LENGTH


def test_held_prompts_push_back():
    driver = Driver(Role.PREFILL, max_held_pages=4)
    driver.run(request(1, PROMPT, Route.EXPORT), request(2, [30] * 8, Route.EXPORT))
    assert RequestId(2, 0) not in driver.parts
    assert driver.engine.load().capacity == 0 and not driver.engine.has_work()
    driver.run(LeaseEnded(RequestId(1, 0)))
    assert driver.parts[RequestId(2, 0)][-1].last


@pytest.mark.parametrize(("role", "route"), [(Role.PREFILL, Route.EXPORT), (Role.UNIFIED, Route.LOCAL)])
def test_rest_of_a_begun_prompt_is_work(role, route):
    """Otherwise autoscaling takes a worker in the middle of a long prompt for idle, and a router for one that is soon
    done.
    """
    driver = Driver(role, max_prefill_tokens=4, overlap=False, prefix_cache=False)
    for room, prompt in enumerate((PROMPT, [7] * 9)):
        driver.submit(request(1 + room, prompt, route, max_tokens=1))
    left, waiting, begun = len(PROMPT) + 9, [], []
    while driver.engine.has_work() and len(waiting) < 20:
        driver.step()
        waiting.append(driver.engine.load().waiting_tokens)
        begun.append(driver.engine.load().begun_tokens)
    assert waiting[:-1] == [max(left - 4 * (1 + step), 0) for step in range(len(waiting) - 1)] and waiting[-1] == 0
    assert len(waiting) > left // 4
    assert begun[0] == len(PROMPT) - 4 and begun[-2:] == waiting[-2:], "the other one waits at first"


@pytest.mark.parametrize(("role", "route"), [(Role.PREFILL, Route.EXPORT), (Role.UNIFIED, Route.LOCAL)])
def test_short_prompt_is_computed_beside_a_long_one_that_came_before(role, route, monkeypatch):
    """The long one keeps a quarter of each step's tokens, and has the rest when no shorter prompt wants it."""
    driver = Driver(role, max_prefill_tokens=8, overlap=False, prefix_cache=False, num_pages=100)
    scheduler, planned = driver.engine._scheduler, []
    complete = scheduler._complete

    def completed(plan):
        planned.append({chunk.seq.id.room: chunk.end - chunk.start for chunk in plan.chunks})
        return complete(plan)

    monkeypatch.setattr(scheduler, "_complete", completed)
    for prompts in ({1: 30}, {2: 3}, {3: 12, 4: 2}):
        for room, size in prompts.items():
            driver.submit(request(room, [7] * size, route, max_tokens=1))
        driver.step()
    driver.run()
    assert [plan for plan in planned if plan] == [
        {1: 8},
        {1: 5, 2: 3},
        {1: 2, 3: 4, 4: 2},  # a prompt of much less tokens comes first, too
        {1: 2, 3: 6},
        {1: 6, 3: 2},
        {1: 7},
    ]


def test_prompt_that_replicas_share_keeps_no_tokens_of_a_step_for_itself(monkeypatch):
    """It is computed in shared chunks only."""
    driver = Driver(
        Role.PREFILL, max_prefill_tokens=8, context_parallel_tokens=20, overlap=False, prefix_cache=False, num_pages=100
    )
    scheduler, planned = driver.engine._scheduler, []
    monkeypatch.setattr(type(scheduler), "_take_shared", lambda self, plan: None)
    take_chunks = scheduler._take_chunks

    def taken(plan):
        take_chunks(plan)
        planned.append({chunk.seq.id.room: chunk.end - chunk.start for chunk in plan.chunks})

    monkeypatch.setattr(scheduler, "_take_chunks", taken)
    for prompts in ({1: 30}, {2: 4, 3: 4}):
        for room, size in prompts.items():
            driver.submit(request(room, [7] * size, Route.EXPORT, max_tokens=1))
        driver.step()
    assert {2: 4, 3: 4} in planned


@pytest.mark.parametrize(("role", "route"), [(Role.UNIFIED, Route.LOCAL), (Role.PREFILL, Route.EXPORT)])
@pytest.mark.parametrize(("keep_s", "left"), [(0, 0), (120, 2)])
def test_pages_of_a_request_that_keeps_them_outlive_later_ones(role, route, keep_s, left):
    driver = Driver(role, num_pages=9)
    for room, tokens in ((1, PROMPT), (2, [20] * 20), (3, [21] * 20)):
        driver.run(msgspec.structs.replace(request(room, tokens, route, max_tokens=1), keep_s=keep_s * (room == 1)))
        driver.step(LeaseEnded(RequestId(room, 0)))
    pages, prefix = driver.cache.match(PROMPT, 9, b"")
    assert len(pages) == left
    driver.cache.release(prefix, pages)
    driver.check_whole()


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_abort_keeps_what_was_published_until_the_lease_ends(overlap, steps):
    driver = Driver(Role.PREFILL, overlap=overlap, max_prefill_tokens=4)
    driver.submit(request(1, PROMPT, Route.EXPORT))
    for _ in range(steps):
        driver.step()
    id = RequestId(1, 0)
    published = sum(len(part.page_ids) for part in driver.parts.get(id, []))
    driver.run(Abort(id))
    assert driver.engine.load().pages_published == published and driver.engine.load().pages_running == 0
    driver.run_out(LeaseEnded(id))


def test_lease_that_ends_early_ends_the_request():
    driver = Driver(Role.PREFILL, max_prefill_tokens=4)
    driver.step(request(1, PROMPT, Route.EXPORT))
    driver.step()
    driver.run(LeaseEnded(RequestId(1, 0)))
    assert driver.finish[RequestId(1, 0)].error.reason == "KV_EXPIRED"
    driver.check_whole()


# ---------------------------------------------------------------------------------------------- the door


@pytest.mark.parametrize(
    ("bad", "reason", "words"),
    [
        (request(1, [20] * 25), "CONTEXT_TOO_LONG", "33 tokens; this engine has max_model_len=32"),
        (request(1, [20], Route.EXPORT), "INVALID_ARGUMENT", "route export"),
        (request(1, [20] * 9, prior=8), "INVALID_ARGUMENT", "max_tokens=8"),
        (request(1, [20], logit_bias={200: 1.0}), "INVALID_ARGUMENT", "logit_bias"),
        (request(1, [20], stop_token_ids=(200,)), "INVALID_ARGUMENT", "stop_token_ids has a token id"),
    ],
)
def test_refusals_name_field_and_limit(bad: Request, reason: str, words: str):
    driver = Driver(Role.UNIFIED)
    driver.engine.submit(Submit(bad))
    (output,) = driver.engine.step().outputs
    assert output.finish is FinishReason.ERROR and output.first_index == bad.num_prior_outputs
    assert output.error.reason == reason and words in output.error.message
    driver.check_whole()


def test_what_can_never_fit_is_refused_at_once():
    driver = Driver(Role.UNIFIED, num_pages=5)
    driver.run(request(1, PROMPT, max_tokens=20))
    assert driver.finish[RequestId(1, 0)].error.message == "29 tokens need 8 KV pages of 4; this engine has 4"


def test_full_engine_says_so():
    driver = Driver(Role.UNIFIED, max_running=1, max_waiting=1)
    for room in range(3):
        driver.submit(request(room, [20]))
    assert driver.engine.load().capacity == 0
    driver.run()
    assert [room for room in range(3) if driver.finish[RequestId(room, 0)].error] == [2]
    assert driver.finish[RequestId(2, 0)].error.reason == "OVERLOADED"
