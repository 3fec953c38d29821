"""What a rank says of itself: how far it is, how long a step may take, what takes longer."""

import dataclasses
import math

import pytest
from engine.harness import Clock
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.pace import FEW, LEAST_S, TICK_S, TIMES
from millrace_serve.engine.health.heartbeat import HeartbeatThread
from millrace_serve.engine.health.progress import Progress
from millrace_serve.engine.step.batch import ContextParallelChunk, HostBatch, StepBatch
from millrace_serve.model.context_parallel.split import Split

CHUNKS = st.lists(st.tuples(st.integers(1, 16384), st.integers(0, 131072)), max_size=4)


def batch(*chunks: tuple[int, int], all_decode: bool = True) -> HostBatch:
    """Of chunks, each with its tokens and those before it."""
    lens, ends = tuple(new for new, _ in chunks), tuple(new + before for new, before in chunks)
    return dataclasses.replace(StepBatch.idle(), chunk_lens=lens, chunk_ends=ends, all_decode=all_decode and not chunks)


def run(progress: Progress, clock: Clock, step: HostBatch, seconds: float) -> None:
    with progress.waits():
        clock.now += 100.0
    progress.launches(step)
    clock.now += seconds
    progress.finished()


def known(clock: Clock, decode_s: float = 0.02, token_s: float = 1e-4) -> Progress:
    progress = Progress(clock)
    for _ in range(FEW):
        run(progress, clock, batch(), decode_s)
        run(progress, clock, batch((500, 0)), 500 * token_s)
    return progress


@given(st.lists(st.floats(0.001, 5.0), min_size=FEW, max_size=50))
def test_step_may_take_twenty_times_the_slowest(times: list[float]) -> None:
    """Waiting is no part of it."""
    clock = Clock()
    progress = Progress(clock)
    for seconds in times:
        run(progress, clock, batch(), seconds)
    progress.launches(batch())
    assert progress.limit_s == pytest.approx(max(LEAST_S, TIMES * max(times)))


@given(CHUNKS, st.floats(1e-5, 1e-2))
def test_long_chunk_may_take_what_its_tokens_take(chunks: list[tuple[int, int]], token_s: float) -> None:
    """A token that sees 16,384 others costs twice as much."""
    clock = Clock()
    progress = known(clock, token_s=token_s)
    progress.launches(batch(*chunks))
    takes = sum(new * token_s * (1 + (new + before) / 16384) for new, before in chunks)
    assert progress.limit_s >= max(LEAST_S, 3 * takes)
    assert progress.limit_s <= max(LEAST_S, TIMES * 0.02, 5 * (takes + 300 * token_s))


@pytest.mark.parametrize("before", [batch((16384, 100_000)), batch(all_decode=False)])
def test_long_chunk_leaves_no_trace_in_the_limit_of_other_steps(before: HostBatch) -> None:
    """Of this replica, or of another one."""
    clock = Clock()
    progress = known(clock)
    run(progress, clock, before, 13.0)
    progress.launches(batch())
    assert progress.limit_s == LEAST_S


def test_limit_is_that_of_the_largest_step_in_flight() -> None:
    progress = known(Clock())
    progress.launches(batch((16384, 0)))
    largest = progress.limit_s
    progress.launches(batch())
    assert progress.limit_s == largest > 10
    progress.finished()
    assert progress.limit_s == LEAST_S


def test_shared_chunk_counts_whole() -> None:
    shared = batch(all_decode=False)
    tokens = slots = shared.slots
    shared.shared = ContextParallelChunk(Split(0, 1, 2, 0, 16384), tokens, slots)
    progress, alone = known(Clock()), known(Clock())
    progress.launches(shared)
    alone.launches(batch((16384, 0)))
    assert progress.limit_s == alone.limit_s > 10


@pytest.mark.parametrize("step", [batch(), batch((500, 0))])
def test_what_is_announced_is_no_pace(step: HostBatch) -> None:
    """A compilation of 15 s would allow every step 300 s, or every one with chunks 75 s."""
    clock, told = Clock(), []
    progress = known(clock)
    progress.tell = lambda: told.append(progress.doing)
    with progress.busy("outer"):
        progress.launches(step)
        with progress.busy("inner"):
            clock.now += 15
            progress.finished()
    assert told == ["outer", "outer", "outer", ""] and progress.doing == ""
    run(progress, clock, step, 0.02)
    progress.launches(step)
    assert progress.limit_s == LEAST_S


@pytest.mark.parametrize("step", [batch(), batch((500, 0))])
def test_what_is_announced_while_the_thread_waits_is_no_pace(step: HostBatch) -> None:
    """The step under way waits for it, too: one that compiles, while its rank waits for the others' next step."""
    clock = Clock()
    progress = known(clock)
    progress.launches(step)
    with progress.waits(), progress.busy("a compilation"):
        clock.now += 15
    clock.now += 0.02
    assert progress.finished() is None
    run(progress, clock, step, 0.02)
    progress.launches(step)
    assert progress.limit_s == LEAST_S


def test_announcement_ends_with_an_error_too() -> None:
    progress = Progress()
    with pytest.raises(OSError), progress.busy("a profile"):
        raise OSError
    assert progress.doing == ""


def test_pause_is_no_part_of_the_last_step_before_it() -> None:
    """A follower takes the results of a step when it has launched the next one."""
    clock = Clock()
    progress = known(clock)
    progress.launches(batch())
    with progress.waits():
        clock.now += 3600
    progress.launches(batch())
    assert progress.finished(late=True) is None
    assert progress.limit_s == LEAST_S
    clock.now += 0.5
    assert progress.finished() == 0.5


def test_pause_of_a_rank_is_no_pace() -> None:
    """A pause of 4 s would allow a step 80 s."""
    clock = Clock()
    progress = known(clock)
    with HeartbeatThread(progress, lambda heartbeat: None):
        run(progress, clock, batch(), 4.0)
        progress.launches(batch())
        assert progress.limit_s <= 2 * TICK_S * TIMES


def test_first_steps_have_no_limit() -> None:
    progress = Progress(Clock())
    progress.launches(batch())
    assert progress.limit_s == math.inf


def test_every_wait_and_every_step_leaves_a_mark() -> None:
    clock = Clock()
    progress = Progress(clock)
    assert progress.waiting
    seen = [progress.marks]
    with progress.waits():
        assert progress.waiting
        seen.append(progress.marks)
    assert not progress.waiting
    seen.append(progress.marks)
    progress.launches(batch())
    progress.finished()
    seen.append(progress.marks)
    assert seen == sorted(set(seen)) and progress.launched == 1
