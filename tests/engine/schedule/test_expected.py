"""What a decode engine learns of outputs, and how many pages it keeps for them."""

import random
from types import SimpleNamespace

import pytest
from engine.harness import Driver
from hypothesis import given
from hypothesis import strategies as st
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import Abort, Request, RequestId, SamplingParams
from millrace_serve.engine.drafts.counts import DraftCounts, usable
from millrace_serve.engine.schedule.expected import LEAST, UNKNOWN, WINDOW, Outputs, need
from millrace_serve.engine.schedule.scheduler import Scheduler
from millrace_serve.engine.sim.runner import SimSettings

lengths = st.integers(1, 5000)


@given(st.lists(lengths, max_size=3 * WINDOW), lengths, st.integers(0, 10_000))
def test_rest_is_one_of_those_that_longer_outputs_had(ended: list[int], length: int, number: int) -> None:
    outputs = Outputs()
    for each in ended:
        outputs.ended(each)
    rest = outputs.rest(length, number)
    longer = [each - length for each in ended[-WINDOW:] if each > length]
    if len(ended) < LEAST:
        assert rest == 0
    elif longer:
        assert rest in longer
    else:
        assert rest == length


@given(st.lists(lengths, min_size=LEAST, max_size=WINDOW), st.integers(0, 1000))
def test_successive_arrivals_expect_what_outputs_had_on_average(ended: list[int], first: int) -> None:
    outputs = Outputs()
    for each in ended:
        outputs.ended(each)
    rests = [outputs.rest(0, first + i) for i in range(400)]
    mean = sum(ended) / len(ended)
    assert abs(sum(rests) / len(rests) - mean) <= 0.02 * max(ended)


@pytest.mark.parametrize(("window", "mean"), [(0, UNKNOWN), (LEAST, 10), (2 * LEAST, 55)])
def test_outputs_beyond_the_window_are_forgotten(window: int, mean: int) -> None:
    outputs = Outputs(window)
    for length in (1000, 100, 10):
        for _ in range(LEAST):
            outputs.ended(length)
    assert outputs.mean == mean and len(outputs._sorted) == len(outputs._latest) == window


@pytest.mark.parametrize(("sent", "used"), [((5, 0, 999), (5, 0, 999)), ((5, 1000, 6), (5,)), ((2**32 - 1,), ())])
def test_drafts_are_used_up_to_the_first_that_is_no_token(sent: tuple[int, ...], used: tuple[int, ...]) -> None:
    assert usable(sent, 1000) == used


def test_drafts_are_counted_by_their_place() -> None:
    counts, seq = DraftCounts(3), SimpleNamespace(num_drafted=0, num_accepted=0)
    for drafted, accepted in ((3, 1), (2, 2), (3, 0), (0, 0)):
        counts.add(seq, drafted, accepted)  # type: ignore[arg-type]
    assert (counts.drafted, counts.accepted) == ([3, 3, 2], [2, 1, 0])
    assert (seq.num_drafted, seq.num_accepted) == (8, 3)


def simulated(sequences: list[tuple[int, int]]) -> int:
    """The same, one step after the other."""
    return max(
        sum(step if step <= rest else -held for rest, held in sequences)
        for step in range(max((rest for rest, _ in sequences), default=0) + 1)
    )


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=8))
def test_need_is_the_highest_of_all_steps_and_a_margin(sequences: list[tuple[int, int]]) -> None:
    growth = need(sequences) - max(simulated(sequences), 0)
    total = sum(rest for rest, _ in sequences)
    assert 0 <= growth <= total / 2 + 1
    assert bool(growth) == bool(total)


def request(room: int, length: int, **sampling: object) -> Request:
    tokens = random.Random(room).choices(range(16, 200), k=length)
    return Request(id=RequestId(room, 0), token_ids=tokens, sampling=SamplingParams(**sampling))  # type: ignore[arg-type]


SETTINGS = SimSettings(vocab_size=200, page_kv_bytes=8)  # outputs end at max_tokens


def driver(num_pages: int = 20) -> tuple[Driver, Scheduler]:
    made = Driver(
        Role.UNIFIED, SETTINGS, num_pages=num_pages + 1, max_running=8, max_prefill_tokens=64, prefix_cache=False
    )
    return made, made.scheduler


def learn(scheduler: Scheduler, length: int) -> None:
    for _ in range(LEAST):
        scheduler.outputs.ended(length)


def most_running(made: Driver) -> int:
    most = 0
    while made.engine.has_work():
        made.step()
        most = max(most, made.engine.load().running)
    for id, tokens in made.tokens.items():
        assert tokens == made.expected(id)
    return most


def test_room_is_kept_for_expected_outputs_and_nothing_is_preempted() -> None:
    """Six requests of 1 + 6 pages want 42 of 20 pages. Unknowing, the engine lets all of them in and preempts."""
    seen = {}
    for knows in (False, True):
        made, scheduler = driver()
        if knows:
            learn(scheduler, 24)
        for room in range(6):
            made.submit(request(room, 4, max_tokens=24))
        seen[knows] = (most_running(made), made.engine.load().counters["preemptions"])
    running, preemptions = seen[False]
    assert running == 6 and preemptions > 0
    running, preemptions = seen[True]
    assert 2 <= running < 6 and preemptions == 0


def test_no_more_is_expected_than_max_tokens() -> None:
    made, scheduler = driver()
    learn(scheduler, 1000)
    for room in range(4):
        made.submit(request(room, 4, max_tokens=4))
    assert most_running(made) == 4


def test_sequence_runs_however_long_outputs_are() -> None:
    """The pool has room for one whole sequence, and no more."""
    made, scheduler = driver(num_pages=8)
    learn(scheduler, 10_000)
    for room in range(3):
        made.submit(request(room, 8, max_tokens=24))
    assert most_running(made) >= 1
    assert made.engine.load().counters["preemptions"] == 0


def test_outputs_that_ended_are_learned_and_aborted_ones_too() -> None:
    made, scheduler = driver()
    for room in range(LEAST):
        made.submit(request(room, 4, max_tokens=5))
    made.run()
    assert scheduler.outputs.rest(0, 1) == 5
    for room in range(100, 100 + WINDOW):
        made.submit(request(room, 4, max_tokens=28))
        while not made.tokens.get(RequestId(room, 0)):
            made.step()
        made.tell(Abort(RequestId(room, 0)))
        made.run()
    assert scheduler.outputs.rest(0, 1) < 5
