"""What an engine tells routers of requests that wait in it, and how much more it promises to take."""

import math

import msgspec
import pytest
from engine.harness import Driver, fill_pages, first_output, request
from hypothesis import given
from hypothesis import strategies as st
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import Abort, KvArrived, KvOffered, RequestId, Route, SequenceOutput, TokenOutput, Wait
from millrace_serve.engine.schedule.capacity import QUEUE_S
from millrace_serve.engine.schedule.expected import LEAST, MARGIN, UNKNOWN, Outputs, room
from millrace_serve.engine.schedule.waiting import LOOK_S
from millrace_serve.engine.sim.runner import SimSettings
from millrace_testing.examples import examples


def step(driver: Driver, seconds: float = LOOK_S) -> list[Wait]:
    driver.clock.now += seconds
    return driver.step().waits


def prompts(length: int, route: Route = Route.LOCAL, count: int = 2, **sampling: object) -> list:
    options = {"max_tokens": 8, "ignore_eos": True, **sampling}
    return [request(room, [20 + room] * length, route, **options) for room in range(1, count + 1)]


@pytest.mark.parametrize(("role", "route"), [(Role.PREFILL, Route.EXPORT), (Role.UNIFIED, Route.LOCAL)])
def test_prompt_in_the_queue_waits_until_its_turn(role: Role, route: Route) -> None:
    """Chunks of 6 tokens: the second prompt of 24 comes after four steps, each as long as a look is due after."""
    driver = Driver(role, num_pages=40)
    first, second = prompts(24, route)
    driver.submit(first, second)
    told = [wait for _ in range(9) for wait in step(driver)]
    assert told == [Wait(second.id), Wait(second.id, over=True)]


def test_wait_of_an_aborted_request_is_told_no_more() -> None:
    driver = Driver(Role.UNIFIED, num_pages=40)
    first, second = prompts(24)
    driver.submit(first, second)
    assert step(driver) + step(driver) + step(driver) == [Wait(second.id)]
    driver.tell(Abort(second.id))
    assert not [wait for _ in range(9) for wait in step(driver)]


def test_who_goes_on_soon_is_told_of_nobody() -> None:
    driver = Driver(Role.UNIFIED, num_pages=40)
    driver.submit(*prompts(6, count=3))
    assert not [wait for _ in range(20) for wait in step(driver, LOOK_S / 4)]


def test_import_without_pages_waits_for_them() -> None:
    driver = Driver(Role.DECODE, num_pages=8)
    first, second = prompts(20, Route.IMPORT)
    for one in (first, second):
        driver.submit(one)
        driver.tell(KvOffered(one.id))
    told = step(driver) + step(driver) + step(driver)
    assert told == [Wait(second.id)] and not driver.engine.has_work()
    assert driver.engine.wait_s() == LOOK_S, "nothing runs, and somebody waits for news"
    driver.tell(Abort(first.id))
    token = SequenceOutput(first.id, 0, [TokenOutput(30)])
    driver.tell(KvArrived(first.id, token))
    assert step(driver) + step(driver) == [Wait(second.id, over=True)]


def test_preempted_sequence_waits() -> None:
    driver = Driver(Role.UNIFIED, num_pages=12)
    driver.submit(*prompts(12, max_tokens=20))
    told = []
    while driver.engine.has_work():
        told += step(driver, LOOK_S / 2)
    assert driver.engine.load().counters["preemptions"] > 0
    late = RequestId(2, 0)
    assert told[0] == Wait(late) and told[-1] == Wait(late, over=True)


def test_sequence_without_a_slot_waits() -> None:
    driver = Driver(Role.DECODE, num_pages=40, max_running=1)
    for one in prompts(4, Route.IMPORT):
        driver.step(one, KvOffered(one.id))
        reserved, first = driver.reserved[one.id], first_output(driver, one.id)
        fill_pages(driver, reserved.page_ids, one.token_ids, reserved.num_cached_pages)
        driver.arrived[one.id] = first.tokens[0].token_id
        driver.tell(KvArrived(one.id, first))
    assert [wait for _ in range(12) for wait in step(driver)] == [
        Wait(RequestId(2, 0)), Wait(RequestId(2, 0), over=True)
    ]  # fmt: skip


@examples(15)
@given(
    st.sampled_from([Role.UNIFIED, Role.PREFILL]),
    st.lists(st.tuples(st.integers(1, 20), st.integers(1, 12), st.sampled_from([0, 0.2, 0.5, 2.0])), max_size=12),
)
def test_each_wait_that_began_is_over_or_its_request_has_ended(role: Role, work: list[tuple[int, int, float]]) -> None:
    driver, waiting = Driver(role), set()

    def take(waits: list[Wait]) -> None:
        for wait in waits:
            assert (wait.id in waiting) is wait.over, "told twice"
            (waiting.discard if wait.over else waiting.add)(wait.id)

    route = Route.EXPORT if role is Role.PREFILL else Route.LOCAL
    for room_id, (length, outputs, seconds) in enumerate(work, 1):
        driver.submit(request(room_id, [20 + room_id] * length, route, max_tokens=outputs))
        take(step(driver, seconds))
    for _ in range(300):
        take(step(driver))
    live = {id for id, seq in driver.here.live.items() if seq in driver.here.waiting._members}
    assert {id for id in waiting if id not in driver.finish and not driver.parts.get(id)} <= live


# ------------------------------------------------------------------------------------- room


def test_room_of_an_idle_engine_is_the_pool_and_shrinks_with_requests() -> None:
    driver = Driver(Role.UNIFIED, num_pages=65, max_model_len=256, max_running=8)
    before = driver.engine.load().room
    assert before == 64 * 4
    for one in prompts(8, count=3, max_tokens=30):
        driver.step(one)
        load = driver.engine.load()
        assert load.room < before - 8, "prompt and expected output"
        before = load.room
    driver.run()
    assert driver.engine.load().room == 64 * 4


def test_import_that_is_expected_takes_room_before_it_has_pages() -> None:
    driver = Driver(Role.DECODE, num_pages=65, max_model_len=256)
    (one,) = prompts(40, Route.IMPORT, count=1, max_tokens=100)
    driver.step(one)
    assert driver.engine.load().pages_free == 64 and driver.engine.load().room < 64 * 4 - 100


def test_newcomer_within_the_promised_room_preempts_nobody() -> None:
    """Whoever keeps to it never meets a wait for pages, whatever the lengths: outputs as long as max_tokens allow."""
    driver = Driver(Role.UNIFIED, num_pages=31, max_model_len=120, max_running=9)
    served = 0
    for room_id in range(1, LEAST):
        length, outputs = 5 + room_id * 7 % 20, 10 + room_id * 11 % 40
        while driver.engine.load().room < length + min(outputs - 1, driver.engine.load().expected_output):
            step(driver, 0.1)
        driver.step(request(room_id, [20 + room_id] * length, max_tokens=outputs, ignore_eos=True))
        served += 1
    driver.run(max_steps=5000)
    assert served == LEAST - 1 and driver.engine.load().counters["preemptions"] == 0


def test_capacity_of_a_decode_worker_ends_soon_after_its_slots() -> None:
    driver = Driver(Role.DECODE, num_pages=65, max_running=8, max_waiting=50)
    assert driver.engine.load().capacity == 10
    driver.step(*prompts(4, Route.IMPORT, count=10))
    assert driver.engine.load().capacity == 0
    driver.step(request(99, [20] * 4, Route.IMPORT, max_tokens=2))
    assert RequestId(99, 0) in driver.here.live, "several routers may have seen the last capacity"


def test_prefill_worker_takes_what_it_computes_in_seconds() -> None:
    driver = Driver(Role.PREFILL, num_pages=65)
    assert driver.engine.load().room == 64 * 4, "nothing is measured yet"
    (one,) = prompts(24, Route.EXPORT, count=1)
    driver.submit(one)
    for _ in range(4):
        step(driver, 1.0)
    load = driver.engine.load()
    assert load.room == int(driver.scheduler.speeds.prompt_tokens_per_s * QUEUE_S) - load.waiting_tokens
    for room_id in range(5, 15):
        driver.submit(request(room_id, [20 + room_id] * 24, Route.EXPORT, max_tokens=2))
    driver.step()
    assert driver.engine.load().room < 0


@pytest.mark.parametrize(("drafts", "tokens"), [(0, 1.0), (2, 3.0)])
def test_worker_that_decodes_tells_the_speed_of_a_sequence(drafts: int, tokens: float) -> None:
    """However many sequences a step has. Steps with prompts, and pauses between steps, do not count."""
    settings = SimSettings(acceptance=1.0)
    driver = Driver(Role.UNIFIED, settings, num_pages=65, max_model_len=128, max_running=8, draft_tokens=drafts)
    assert driver.engine.load().output_tokens_per_s == 0.0, "nothing is measured yet"
    for first in (1, 4):
        for one in prompts(4, count=3, max_tokens=60):
            driver.submit(msgspec.structs.replace(one, id=RequestId(one.id.room + first, 0)))
        while any(seq.silent for seq in driver.here.live.values()):
            step(driver, 7.0)
        for late in (0.0, 3.0, -0.4, 0.0, 0.2, -0.2, 0.0, 0.0, 0.0):
            step(driver, 0.5 + late)
        assert driver.engine.load().output_tokens_per_s == pytest.approx(tokens / 0.5, rel=0.05)
        driver.run()
        driver.clock.now += 100.0


def test_until_outputs_are_known_they_are_expected_to_be_long() -> None:
    outputs = Outputs()
    assert (outputs.mean, outputs.expected(0, 1), outputs.expected(2 * UNKNOWN, 1)) == (UNKNOWN, UNKNOWN, 2 * UNKNOWN)
    for length in range(LEAST):
        outputs.ended(100 + length)
    assert outputs.mean == 116 and outputs.expected(5, 1) == outputs.rest(5, 1)


@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=8), st.integers(0, 5000), st.integers(0, 400)
)
def test_room_falls_with_every_sequence(sequences: list[tuple[int, int]], available: int, mean: int) -> None:
    rooms = [room(available, sequences[:count], mean) for count in range(len(sequences) + 1)]
    assert rooms[0] == available - math.ceil(MARGIN * mean)
    assert all(b <= a + held for (_, held), a, b in zip(sequences, rooms, rooms[1:], strict=False))


def test_warm_ups_teach_nothing() -> None:
    driver = Driver(Role.UNIFIED, num_pages=65)
    for one in prompts(4, count=LEAST + 1, max_tokens=2):
        driver.run(msgspec.structs.replace(one, warms=True))
    assert driver.engine.load().expected_output == UNKNOWN
