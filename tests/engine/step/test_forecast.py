"""When the next step is launched: before the device waits, and not much earlier."""

import dataclasses

import pytest
from engine.harness import Clock, Driver, request
from engine.health.test_progress import batch
from engine.schedule.test_schedulers import import_all
from hypothesis import given
from hypothesis import strategies as st
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import KvOffered, RequestId, Route
from millrace_serve.engine.step.batch import HostBatch
from millrace_serve.engine.step.forecast import FRESH_S, RECENT, SPARE, SPARE_S, Forecast, kind


def decode(num_sequences: int, num_queries: int = 1, **fields: object) -> HostBatch:
    return dataclasses.replace(batch(), num_decode=num_sequences, num_queries=num_queries, **fields)


KIND = kind(decode(8))


def seen(clock: Clock, times: list[float], launch_s: float = 0.0) -> Forecast:
    """Steps of KIND."""
    found = Forecast(clock)
    for seconds in times:
        found.launched(launch_s)
        clock.now += seconds
        found.finished(KIND, seconds)
    return found


def expected(seconds: float) -> float:
    return pytest.approx(seconds * (1 - SPARE) - SPARE_S)


def test_nothing_is_held_back_where_nothing_is_known() -> None:
    clock = Clock()
    assert Forecast(clock).launch_delay_s(KIND, clock.now) == 0
    found = seen(clock, [0.02])
    assert found.launch_delay_s(kind(decode(80)), clock.now) == found.launch_delay_s(None, clock.now) == 0, (
        "other kinds"
    )


@given(st.lists(st.floats(0.001, 0.1), min_size=1, max_size=12), st.floats(0, 0.01))
def test_fastest_of_the_latest_steps_counts(times: list[float], launch_s: float) -> None:
    clock = Clock()
    found = seen(clock, times, launch_s)
    shortest = min(times[-RECENT:])
    assert found.launch_delay_s(KIND, clock.now) == pytest.approx(max(shortest * (1 - SPARE) - SPARE_S - launch_s, 0.0))


def test_hold_ends_with_the_time_that_passes() -> None:
    clock = Clock()
    found = seen(clock, [0.02])
    began = clock.now
    clock.now += 0.01
    assert found.launch_delay_s(KIND, began) == pytest.approx(0.02 * (1 - SPARE) - SPARE_S - 0.01)
    clock.now += 0.01
    assert found.launch_delay_s(KIND, began) == 0


def test_what_is_old_is_forgotten() -> None:
    clock = Clock()
    found = seen(clock, [0.02])
    clock.now += FRESH_S - 0.01
    assert found.launch_delay_s(KIND, clock.now) == expected(0.02)
    clock.now += 0.02
    assert found.launch_delay_s(KIND, clock.now) == 0


def test_step_of_seconds_does_not_make_the_others_old() -> None:
    """A process that was stopped for so long would hold the next step back for as long again."""
    clock = Clock()
    found = seen(clock, [0.02] * RECENT + [FRESH_S + 0.5])
    assert found.launch_delay_s(KIND, clock.now) == expected(0.02)


def test_slow_launch_is_remembered_for_some_steps() -> None:
    clock = Clock()
    found = seen(clock, [0.02], launch_s=0.5)
    assert found.launch_delay_s(KIND, clock.now) == 0
    for _ in range(60):
        found.finished(KIND, 0.02)
        found.launched(0.001)
    assert found.launch_delay_s(KIND, clock.now) == pytest.approx(0.02 * (1 - SPARE) - SPARE_S - 0.001)


def test_step_that_says_nothing_of_others_is_not_counted() -> None:
    clock = Clock()
    found = seen(clock, [0.02])
    found.finished(KIND, None)
    found.launched(0.0)
    assert found.launch_delay_s(KIND, clock.now) == expected(0.02)


def test_step_that_ended_before_its_time_ends_the_holds_of_its_kind() -> None:
    """What the host saw of it is the hold itself, and would be the next one's reason."""
    clock = Clock()
    found = seen(clock, [0.8] * RECENT)
    clock.now += 0.7
    found.finished(KIND, None, late=True)
    found.launched(0.0)
    assert found.launch_delay_s(KIND, clock.now) == 0
    clock.now += 0.03
    found.finished(KIND, 0.03)
    found.launched(0.0)
    assert found.launch_delay_s(KIND, clock.now) == expected(0.03)


def test_kinds_are_steps_that_take_as_long() -> None:
    assert kind(decode(64)) == kind(decode(70)) != kind(decode(80))
    assert kind(decode(64)) != kind(decode(32, num_queries=2)), "drafts are passes of their own"
    assert kind(batch((500, 0))) == kind(batch((510, 0))) not in {kind(batch((700, 0))), kind(decode(500))}
    assert kind(batch((500, 0))) != kind(batch((500, 16384))), "a token that sees many others costs more"


def test_replicas_take_as_long_as_the_largest_of_them() -> None:
    assert kind(decode(1, dp_num_tokens=(1, 64))) == kind(decode(64))
    assert kind(decode(0, dp_num_tokens=(0, 64), all_decode=False)) is None, "chunks of another replica"


def test_what_comes_while_a_step_runs_is_in_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver(Role.UNIFIED, checks=())
    engine = driver.engine
    monkeypatch.setattr(engine._forecast, "launch_delay_s", lambda of, started_at: 0.01)
    assert engine.launch_delay_s() == 0, "no step runs"
    driver.submit(request(1, [20, 21, 22], max_tokens=8))
    assert engine.wait_s() == 0
    driver.step()
    assert engine.launch_delay_s() == engine.wait_s() == 0.01
    driver.submit(request(2, [30, 31, 32], max_tokens=8))
    assert engine.wait_s() == 0.01, "the message does not end the wait"
    driver.step()  # launches the step with both
    driver.step()
    assert len(driver.tokens[RequestId(2, 0)]) == 1
    engine.stop()
    assert engine.launch_delay_s() == 0
    monkeypatch.undo()
    driver.run()


@pytest.mark.parametrize("poison", [False, True])
def test_pages_for_what_is_offered_are_reserved_between_two_steps(poison: bool) -> None:
    """Not with poison: the step's stream fills freed pages, which a transfer would overtake."""
    driver = Driver(Role.DECODE, checks=("poison",) if poison else ())
    wanted = request(1, [20, 21, 22], route=Route.IMPORT)
    driver.submit(wanted)
    driver.engine.launch()
    driver.tell(KvOffered(wanted.id))
    assert not driver.engine.has_events
    driver.engine.reserve()
    assert driver.engine.has_events is not poison
    driver.engine.commit()
    driver.step()
    assert list(driver.reserved) == [wanted.id]


def test_what_is_ready_keeps_its_next_page_from_an_early_reservation() -> None:
    """Otherwise its first step would find none, and it would be preempted, although its KV came from elsewhere."""
    driver = Driver(Role.DECODE, checks=(), num_pages=8, prefix_cache=False)  # 7 pages and the null page
    driver.submit(request(1, [21] * 8, route=Route.IMPORT))  # 2 pages, both full
    driver.submit(request(2, [22] * 17, route=Route.IMPORT, max_tokens=2))  # the other 5
    import_all(driver, 1)
    driver.tell(KvOffered(RequestId(2, 0)))
    driver.engine.reserve()
    driver.step()
    load = driver.engine.load()
    assert (load.running, load.importing, load.counters["preemptions"]) == (1, 0, 0)


def test_prompts_that_are_computed_here_are_not_admitted_between_two_steps() -> None:
    driver = Driver(Role.UNIFIED, checks=())
    driver.submit(request(1, [20, 21, 22], max_tokens=2))
    driver.engine.reserve()
    assert len(driver.here.waiting) == 1
    driver.run_out()
