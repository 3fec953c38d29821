"""Short prompts beside long ones: the rule that divides a step, and first tokens on a clock of the test's own."""

import random
from collections.abc import Iterator
from unittest import mock

import msgspec
import numpy as np
import pytest
from engine.harness import Clock, request
from hypothesis import example, given
from hypothesis import strategies as st
from millrace_common.step_times import KEPT, LOSS, SOON, StepTimes, chunk_pairs, tokens_left
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.core import LeaseEnded, RequestId, Route, Submit
from millrace_serve.engine.grammar.grammars import Grammars
from millrace_serve.engine.schedule import waiting
from millrace_serve.engine.schedule.factory import make_scheduler
from millrace_serve.engine.schedule.limits import ModelFacts
from millrace_serve.engine.schedule.plan import StepOutput
from millrace_serve.engine.schedule.sequence import Sequence
from millrace_testing.examples import examples

# V3's widths, 32 experts: 30 layers on an H100, and 61 on an H200
TIMES = {
    "H100": StepTimes(0.020, 3e-5, 4e-9, 0.010, 43e-6, 3.4e-9),
    "H200": StepTimes(0.022, 5e-5, 1e-8, 0.015, 70e-6, 6.8e-9),
}
SHORT, LONG = 500, 100_000
STEP = 2048

times = st.builds(
    StepTimes,
    fixed_s=st.floats(1e-3, 0.1),
    chunk_s=st.floats(0, 0.1),
    token_s=st.floats(1e-6, 1e-3),
    pair_s=st.floats(0, 1e-7),
)
known = times | st.just(StepTimes())
rests = st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 200_000)), max_size=8)
budgets = st.integers(1, 4096)


@examples(300)
@given(times=known, prompts=rests, left=budgets, most=budgets)
def test_every_step_is_used_and_the_first_prompt_goes_on(
    times: StepTimes, prompts: list[tuple[int, int]], left: int, most: int
) -> None:
    left = min(left, most)
    shares = times.divide(prompts, left, most)
    assert sum(shares) <= left and all(0 <= one <= rest for one, (_, rest) in zip(shares, prompts, strict=True))
    if prompts:
        kept = min(prompts[0][1], times.chunk_alone(prompts[0][0], most), int(left * KEPT))
        took = [
            times.token_s * n + times.pair_s * chunk_pairs(start, n)
            for n, (start, _) in zip((shares[0] + 1, *shares[1:]), prompts, strict=True)
        ]
        assert shares[0] >= kept or took[0] >= sum(took[1:]), "as many tokens, or as much time"
        assert shares[0] or left < 1 / KEPT


@examples(300)
@given(times=known, prompts=rests, most=budgets, short=st.integers(1, 64))
def test_a_shorter_rest_never_waits_for_a_longer_one(
    times: StepTimes, prompts: list[tuple[int, int]], most: int, short: int
) -> None:
    shares = times.divide(prompts, most, most)
    for (start, rest), share in zip(prompts[1:], shares[1:], strict=True):
        longer = [one for (_, other), one in zip(prompts[1:], shares[1:], strict=True) if other > rest]
        whole = min(rest, most if start + rest <= SOON * most else times.chunk_alone(start, most))
        assert share == whole or not any(longer)
    rests = [rest for _, rest in prompts]
    if prompts and min(rests) > short and tokens_left(rests, most, most) >= short:
        assert times.divide([*prompts, (0, short)], most, most)[-1] == short


@examples(200)
@given(times=times, start=st.integers(0, 200_000), most=st.integers(64, 4096))
def test_shorter_chunks_cost_a_long_prompt_little(times: StepTimes, start: int, most: int) -> None:
    def token_s(chunk: int) -> float:
        return times.step_s(tokens=chunk, pairs=chunk_pairs(start, chunk) - chunk * chunk / 2) / chunk

    assert token_s(times.chunk_alone(start, most)) <= (1 + LOSS) * token_s(most) * (1 + 1e-9)


# ---------------------------------------------------------------------------------------------- first tokens


def load(seconds: float, short_rate: float, long_rate: float) -> Iterator[tuple[float, int]]:
    """Arrivals at random: time and prompt tokens."""
    rng = random.Random(1)
    for rate, tokens in ((short_rate, SHORT), (long_rate, LONG)):
        now = rng.expovariate(rate)
        while now < seconds:
            yield now, tokens
            now += rng.expovariate(rate)


def first_tokens(
    arrivals: list[tuple[float, int]], role: Role, route: Route, times: StepTimes, limit_s: float = 0.0
) -> list[float]:
    """Seconds to each one, on a device that takes `times`. `limit_s`: of TTFT."""
    clock, room = Clock(), iter(range(1, len(arrivals) + 1))
    config = EngineConfig(num_pages=20_000, max_model_len=1 << 17, max_waiting=5000, max_prefill_tokens=STEP)
    facts = ModelFacts(32_000, frozenset((1,)))
    scheduler = make_scheduler(config, role, facts, clock, Grammars(), times=times)
    todo, took = sorted(arrivals, reverse=True), dict[RequestId, float]()
    while True:
        while todo and todo[-1][0] <= clock.now:
            came, tokens = todo.pop()
            one = request(number := next(room), [20 + number] * tokens, route, max_tokens=1)
            scheduler.handle(Submit(msgspec.structs.replace(one, ttft_limit_s=limit_s)))
            took[one.id] = -came
        plan = scheduler.schedule()
        if plan is None and not todo:
            return [took[RequestId(number, 0)] for number in range(1, len(arrivals) + 1)]
        if plan is None:
            clock.now = max(clock.now, todo[-1][0])
            continue
        clock.now += times.step_s(*plan.work)
        rows = len(plan.decode) + sum(chunk.samples for chunk in plan.chunks)
        tokens, ones = np.full((rows, 1), 7), np.ones(rows, np.int64)
        scheduler.commit(plan, StepOutput(tokens, ones, ones * 0, tokens[:, :0]))
        for output in scheduler.take_events().outputs:
            took[output.id] += clock.now
            if route is Route.EXPORT:
                scheduler.handle(LeaseEnded(output.id))


@pytest.mark.parametrize(
    ("role", "route", "gpu", "short_rate", "long_rate"),
    [(Role.UNIFIED, Route.LOCAL, "H100", 10, 0.015), (Role.PREFILL, Route.EXPORT, "H200", 4, 0.012)],
)
def test_short_prompts_do_not_wait_for_long_ones(
    role: Role, route: Route, gpu: str, short_rate: float, long_rate: float
) -> None:
    arrivals = sorted(load(150, short_rate, long_rate))
    took = first_tokens(arrivals, role, route, TIMES[gpu])
    alone = first_tokens([one for one in arrivals if one[1] == SHORT], role, route, TIMES[gpu])
    short = [s for s, (_, tokens) in zip(took, arrivals, strict=True) if tokens == SHORT]
    chunk = TIMES[gpu].chunk_alone(LONG, STEP)
    longest = TIMES[gpu].step_s(tokens=chunk, pairs=chunk_pairs(LONG, chunk))
    assert np.quantile(short, 0.99) < np.quantile(alone, 0.99) + longest, "a prompt that comes waits for one step's end"


@pytest.mark.parametrize(("role", "route"), [(Role.UNIFIED, Route.LOCAL), (Role.PREFILL, Route.EXPORT)])
def test_late_prompts_take_few_others_down_with_them(role: Role, route: Route) -> None:
    """A third more comes than can be computed."""
    arrivals = [one for one in load(30, 45, 0.01) if one[1] == SHORT]
    ages = [np.array(first_tokens(arrivals, role, route, TIMES["H100"], limit_s)) for limit_s in (0.0, 1.0)]
    in_time = [int((took <= 1.0).sum()) for took in ages]
    assert in_time[1] > 0.5 * len(arrivals) > 3 * in_time[0]


# ---------------------------------------------------------------------------------------------- late prompts

newcomers = st.tuples(
    st.integers(-1, 0),  # priority, the smaller one first
    st.integers(0, 2),  # class of length
    st.sampled_from([0.0, 2.0, 5.0, 20.0]),  # TTFT limit; 0: none
    st.sampled_from([0.0, 99.0]),  # seconds that it takes
    st.booleans(),  # whether it was preempted
    st.integers(0, 2),  # how many get pages then
)
LATE, LOOSE = (0, 0, 2.0, 99.0, False, 0), (0, 0, 0.0, 0.0, False, 0)


@mock.patch.object(waiting, "PASSES", 2)
@examples(200)
@example([LATE, *[(-1, *LATE[1:]), LOOSE, (*LOOSE[:-1], 3)] * 2])  # late ones of a higher priority, one by one
@given(st.lists(newcomers, max_size=80))
def test_late_prompts_wait_for_those_that_can_be_in_time_and_not_for_long(arrivals: list) -> None:
    queue, bounds = waiting.WaitingQueue(), dict[Sequence, int]()
    for now, (priority, kind, limit_s, takes_s, preempted, admitted) in enumerate([*arrivals, (0, 0, 0, 0, False, 99)]):
        one = msgspec.structs.replace(request(now, [20]), ttft_limit_s=limit_s)
        seq = Sequence(one, (priority, now), 9, frozenset(), [], now)
        seq.preempted = preempted
        queue.push(seq, kind, takes_s)
        while admitted and (head := queue.head(begins=now)):
            admitted -= 1
            assert head.order[0] == min(seq.order[0] for seq in queue), "of the highest priority"
            alike = sorted(seq for seq in queue if seq.order[0] == head.order[0])
            assert head is next(seq for seq in alike if seq.late is head.late), "the first of its kind"
            for place, seq in enumerate(alike):
                if seq.late and seq not in bounds:
                    assert 0 < seq.request.ttft_limit_s / 2 < now - seq.arrived and not seq.preempted
                    bounds[seq] = (place + 1) * waiting.PASSES + place
                if seq in bounds and seq is not head:
                    bounds[seq] -= 1
                    assert bounds[seq] >= 0
            queue.admit(head)
    assert not len(queue)
