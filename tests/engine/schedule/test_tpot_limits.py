"""Chunks of prompts beside streams with a TPOT limit, on a clock of the test's own."""

import math
from collections.abc import Sequence as Many
from dataclasses import replace
from unittest import mock

import msgspec
import pytest
from engine.harness import Driver, request
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.step_times import StepTimes, chunk_pairs
from millrace_serve.engine.config import Role
from millrace_serve.engine.core import Route
from millrace_serve.engine.lockstep.lockstep import _agreement, _state
from millrace_serve.engine.schedule.plan import Chunk, ContextParallelTurn, Plan, Work
from millrace_serve.engine.schedule.sequence import Sequence
from millrace_serve.engine.schedule.step_fit import StepFit
from millrace_serve.engine.schedule.waiting import WaitingQueue
from millrace_serve.engine.step.batch import HostBatch
from millrace_testing.examples import examples

TIMES = StepTimes(fixed_s=0.012, sequence_s=5e-5, key_s=4e-8, chunk_s=4e-3, token_s=8e-5, pair_s=2e-9)


class Run:
    """Steps of a real scheduler that take what `times` say; one is under way while the next one is planned."""

    def __init__(self, times: StepTimes = TIMES, **config: object) -> None:
        sizes = {"num_pages": 8000, "max_model_len": 4000, "max_running": 64, "max_prefill_tokens": 1024}
        self.driver = Driver(Role.FLEXIBLE, **{**sizes, "page_size": 16, "checks": (), **config})
        self.scheduler, self.clock, self.times = self.driver.scheduler, self.driver.clock, times
        self.scheduler.speeds._fit = StepFit(times)
        self._launched: list[tuple[Plan, HostBatch]] = []
        self.done: list[Work] = []
        self.heard: dict[Sequence, tuple[float, float]] = {}  # when its first and its newest token came

    def submit(self, room: int, tokens: int, limit_s: float = 0.0, *, route: Route = Route.LOCAL, outputs: int) -> None:
        asked = request(room, [20 + room % 150] * tokens, route, max_tokens=outputs)
        self.driver.submit(msgspec.structs.replace(asked, tpot_limit_s=limit_s))

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def step(self) -> None:
        if plan := self.scheduler.schedule():
            self.scheduler.speeds.launched(plan.work)
            self._launched.append((plan, self.driver.engine._builder.build(plan, 1, None)))
        if len(self._launched) > bool(plan):
            self._commit(*self._launched.pop(0))

    def _commit(self, plan: Plan, batch: HostBatch) -> None:
        self.clock.now += self.times.step_s(*plan.work)
        self.scheduler.commit(plan, self.driver.engine._runner.launch(batch).result())
        self.done.append(plan.work)
        for seq in [*plan.decode, *(chunk.seq for chunk in plan.chunks if chunk.samples)]:
            self.heard[seq] = (self.heard.get(seq, (self.clock.now,))[0], self.clock.now)

    def mean_gaps(self) -> dict[Sequence, float]:
        return {
            seq: (last - first) / (seq.num_outputs - 1)
            for seq, (first, last) in self.heard.items()
            if seq.num_outputs > 1 and seq.tpot_limit_s < math.inf
        }


arrivals = st.tuples(
    st.integers(0, 60),  # steps before it comes
    st.integers(1, 3000),  # prompt tokens
    st.integers(1, 300),  # outputs
    st.sampled_from([0.0, 0.02, 0.03, 0.1]),  # TPOT limit; 0: none
)


@examples(60)
@given(requests=st.lists(arrivals, min_size=2, max_size=12), overlap=st.booleans())
def test_every_stream_keeps_its_limit_whatever_prompts_come(
    requests: Many[tuple[int, int, int, float]], overlap: bool
) -> None:
    run = Run(overlap=overlap)
    for room, (steps, tokens, outputs, limit_s) in enumerate(requests, 1):
        run.steps(steps)
        run.submit(room, tokens, limit_s, outputs=outputs)
    while run.scheduler.requests.live and len(run.done) < 6000:
        run.step()
    assert not run.scheduler.requests.live, "prompts go on"
    assert len(run.heard) == len(requests), "each has an answer"
    for seq, gap_s in run.mean_gaps().items():
        assert gap_s <= seq.tpot_limit_s, seq.num_outputs


@pytest.mark.parametrize("limit_s", [0.03, 0.05, 0.1])
def test_a_long_prompt_holds_neither_streams_nor_short_prompts_up(limit_s: float) -> None:
    """An H200 with 30 layers. Behind 58,000 tokens even a page of tokens takes longer than a step of 50 ms may."""
    times = StepTimes(fixed_s=0.012, sequence_s=1e-4, key_s=1.5e-9, chunk_s=8e-3, token_s=42e-6, pair_s=4e-9)
    run = Run(times, num_pages=2000, max_model_len=66_000, page_size=64, max_prefill_tokens=2048)
    came = {1: run.clock.now}
    run.submit(1, 58_000, limit_s, outputs=2)
    for room in range(2, 62):
        came[room] = run.clock.now
        run.submit(room, 500, limit_s, outputs=150)
        while run.clock.now < came[room] + 0.25:
            run.step()
    while run.scheduler.requests.live:
        run.step()
    waits = {seq.id.room: first - came[seq.id.room] for seq, (first, _) in run.heard.items()}
    assert all(gap_s <= limit_s for gap_s in run.mean_gaps().values())
    assert waits.pop(1) < 35 and max(waits.values()) < 2


def test_a_prompt_beside_quiet_streams_does_not_wait() -> None:
    """128 of their tokens make up for its steps, also where they have just begun."""
    run = Run()
    for room in range(1, 9):
        run.submit(room, 30, 0.03, outputs=1000)
    run.steps(3)
    run.submit(99, 3000, outputs=2)
    run.steps(4)
    assert [step.tokens for step in run.done[-3:]] == [1024, 1024, 952]


def test_short_outputs_leave_prompts_less() -> None:
    """A stream that is expected to end soon cannot make up for long steps."""
    run = Run()
    for _ in range(64):
        run.scheduler.outputs.ended(5)
    run.submit(1, 30, 0.02, outputs=1000)
    run.steps(3)
    run.submit(99, 3000, outputs=2)
    run.steps(2)
    assert 0 < run.done[-1].tokens < 1024


def test_chunks_are_worth_the_time_that_each_takes_anew() -> None:
    run = Run()
    for room in range(1, 9):
        run.submit(room, 30, 0.02, outputs=1000)
    run.steps(3)
    for room in range(99, 102):
        run.submit(room, 3000, outputs=2)
    run.steps(900)
    mixed = [step for step in run.done[3:] if step.tokens]
    assert sum(work.tokens for work in mixed) == 9000
    assert sum(2 * TIMES.chunk_s > work.tokens * TIMES.token_s for work in mixed) <= 3, "but for a prompt's last one"


def test_a_long_silence_is_forgiven() -> None:
    """After a worker stood still for a minute, prompts wait for no more than the longest chunk takes."""
    run = Run()
    run.submit(1, 30, 0.03, outputs=3000)
    run.steps(10)
    run.clock.now += 60.0
    run.submit(99, 1000, outputs=2)
    run.steps(30)
    assert any(step.tokens for step in run.done[-25:])


@pytest.mark.parametrize("overlap", [False, True])
def test_a_prompt_goes_on_when_the_stream_that_it_waits_for_has_ended(overlap: bool) -> None:
    """Nothing else would wake the engine before its next look at what waits."""
    run = Run(overlap=overlap)
    run.scheduler._spare_s = lambda plan: -1.0  # type: ignore[method-assign]
    run.submit(1, 30, 0.03, outputs=4)
    run.driver.step()
    run.submit(2, 1024, outputs=2)
    run.driver.run()
    assert len(run.driver.finish) == 2


@pytest.mark.parametrize(
    ("times", "limit_s", "route", "tokens"),
    [
        (StepTimes(), 0.03, Route.LOCAL, 1024),  # unknown
        (TIMES, 0.0, Route.LOCAL, 1024),  # no limit
        (TIMES, 10.0, Route.LOCAL, 1024),
        (TIMES, 0.001, Route.LOCAL, 16),  # a limit that cannot be kept: prompts go on
        (TIMES, 0.001, Route.EXPORT, 1024),  # of a worker whose duty is prefill
    ],
)
def test_chunks_stay_between_their_bounds(times: StepTimes, limit_s: float, route: Route, tokens: int) -> None:
    run = Run(times)
    run.submit(1, 30, limit_s, outputs=200)
    run.step()
    run.submit(2, 1024, route=route, outputs=2)
    plan = run.scheduler.schedule()
    assert plan is not None and sum(chunk.end - chunk.start for chunk in plan.chunks) == tokens


def test_an_export_that_waits_for_leases_lengthens_no_chunk() -> None:
    run = Run(max_held_pages=10)
    run.submit(1, 30, 0.001, outputs=200)
    for room in (2, 3):
        run.submit(room, 100, route=Route.EXPORT, outputs=2)  # 7 pages
    run.steps(6)
    run.submit(4, 1024, outputs=2)
    run.steps(2)
    assert run.done[-1].tokens == 16


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("spare_s", "tokens"), [(-0.01, 0), (0.02, 0), (0.05, 570), (0.09, 1024)])
def test_streams_of_other_replicas_set_limits_too(spare_s: float, tokens: int, shared: bool) -> None:
    """0.02 s are not worth the 4 ms that the step takes anew, nor does a turn make them so."""
    run = Run(context_parallel_tokens=1000 * shared)
    run.submit(1, 3000, outputs=2)
    if shared:
        run.step()  # now it has pages
        run.scheduler.turn = ContextParallelTurn(mine=True, replicas=2)
    run.scheduler.limit_s, run.scheduler.spare_s = 0.03, spare_s
    plan = run.scheduler.schedule()
    assert 0 <= tokens - (plan.work.tokens if plan is not None else 0) <= 2 * shared


def test_replicas_agree_on_the_least_that_is_spare() -> None:
    """A replica without limits says nothing, and a late one says how late."""
    plans = [Plan([], []), Plan([], [], limit_s=0.04, spare_s=0.3), Plan([], [], limit_s=0.03, spare_s=-0.02)]
    for count, expected in ((1, (math.inf, math.inf)), (2, (0.04, 0.3)), (3, (0.03, -0.02))):
        agreed = _agreement([_state(plan, last=False) for plan in plans[:count]], 0)
        assert (agreed.limit_s, agreed.spare_s) == pytest.approx(expected)


def test_replicas_count_the_work_of_the_one_that_has_most() -> None:
    """All wait for it in each layer. Else one beside a long prompt of another would take its own tokens for slow."""
    plans = [
        Plan([None] * 3, [], work=Work(3, 900)),  # type: ignore[list-item]
        Plan([], [Chunk(None, 58_000, 58_700, samples=False)], work=Work(0, 0, 700, 9e7)),  # type: ignore[arg-type]
        Plan([], []),
    ]
    agreed = _agreement([_state(plan, last=False) for plan in plans], 0)
    assert agreed.widest(plans[0].work) == agreed.widest(plans[1].work) == Work(3, 900, 700, 9e7)
    assert agreed.widest(plans[2].work) == Work(), "its step tells nothing"


def test_the_time_of_a_prompt_counts_from_the_pages_that_it_has() -> None:
    """Whether it is late depends on it. 124 tokens behind 2,976 take longer than 124 at the beginning."""
    run = Run(replace(TIMES, pair_s=1e-6))
    run.submit(1, 3000, outputs=2)
    run.steps(10)
    with mock.patch.object(WaitingQueue, "push") as push:
        run.submit(151, 3100, outputs=2)  # it begins alike
    full_s, pairs = run.times.step_s(tokens=1024), chunk_pairs(2992, 108)
    assert push.call_args.args[2] == pytest.approx(full_s + run.times.step_s(tokens=108, pairs=pairs))
