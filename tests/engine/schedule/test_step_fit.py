"""What a replica learns of the time of its steps."""

import random
from dataclasses import astuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.step_times import StepTimes
from millrace_serve.engine.schedule.plan import Work
from millrace_serve.engine.schedule.step_fit import StepFit
from millrace_testing.examples import examples

TIMES = StepTimes(fixed_s=0.012, sequence_s=5e-5, key_s=4e-8, chunk_s=4e-3, token_s=8e-5, pair_s=2e-9)
SECONDS = st.one_of(st.just(0.0), st.floats(0.2, 5.0))  # of the usual ones


def work(rng: random.Random, *, decode: bool = True, prompts: bool = True) -> Work:
    sequences, tokens = rng.randrange(1, 128) * decode, rng.randrange(16, 2048) * prompts
    return Work(sequences, sequences * rng.randrange(100, 8000), tokens, tokens * (rng.randrange(8000) + tokens / 2))


def kinds(rng: random.Random) -> Work:
    return work(rng, **rng.choice([{"prompts": False}, {"decode": False}, {}]))


def fitted(times: StepTimes, steps: list[Work], noise: float = 0.0, start: StepTimes = StepTimes()) -> StepFit:
    rng, fit = random.Random(3), StepFit(start)
    for one in steps:
        fit.add(one, times.step_s(*one) * rng.uniform(1 - noise, 1 + noise))
    return fit


def check_predictions(found: StepTimes, times: StepTimes, within: float) -> None:
    rng = random.Random(9)
    for one in (kinds(rng) for _ in range(50)):
        assert found.step_s(*one) == pytest.approx(times.step_s(*one), rel=within)


@examples(30)
@given(factors=st.tuples(*[SECONDS] * 6).filter(lambda found: found[0] > 0), seed=st.integers(0, 99))
def test_times_of_steps_are_found(factors: tuple[float, ...], seed: int) -> None:
    times = StepTimes(*(one * factor for one, factor in zip(astuple(TIMES), factors, strict=True)))
    rng = random.Random(seed)
    fit = fitted(times, [kinds(rng) for _ in range(400)], start=TIMES)
    check_predictions(fit.times, times, 0.05)
    assert min(astuple(fit.times)) >= 0
    assert fit.times.token_s == pytest.approx(times.token_s, rel=0.05, abs=4e-6)


def test_noise_and_late_commits_change_little() -> None:
    rng = random.Random(5)
    steps = [kinds(rng) for _ in range(800)]
    fit = fitted(TIMES, steps, noise=0.1)
    check_predictions(fit.times, TIMES, 0.05)
    for one in steps[:50]:
        late = rng.random() < 0.1
        fit.add(one, TIMES.step_s(*one) + (0.5 if late else 0.0))
        if late:
            fit.add(one, 1e-5)  # the step behind it seems to take nothing
    check_predictions(fit.times, TIMES, 0.1)


def test_a_worker_that_becomes_slower_is_followed() -> None:
    rng = random.Random(5)
    slow = StepTimes(*(2 * one for one in astuple(TIMES)))
    fit = fitted(TIMES, [kinds(rng) for _ in range(400)])
    for one in (kinds(rng) for _ in range(4000)):
        fit.add(one, slow.step_s(*one))
    check_predictions(fit.times, slow, 0.05)


@pytest.mark.parametrize("start", [StepTimes(), TIMES], ids=["unknown", "from the plan"])
def test_what_no_step_has_told_stays_as_it_was(start: StepTimes) -> None:
    rng = random.Random(5)
    fit = fitted(TIMES, [work(rng, prompts=False) for _ in range(400)], start=start)
    assert (fit.times.token_s, fit.times.pair_s) == pytest.approx((start.token_s, start.pair_s))
    assert fit.times.known and fit.times.sequence_s == pytest.approx(TIMES.sequence_s, rel=0.05)
    for one in [work(rng) for _ in range(100)] + [work(rng, prompts=False) for _ in range(20_000)]:
        fit.add(one, TIMES.step_s(*one))
    assert fit.times.token_s == pytest.approx(TIMES.token_s, rel=0.05), "prompts are not forgotten while none come"


@pytest.mark.parametrize("chunk", [16, 64, 256, 1024])
def test_longer_chunks_than_any_before_are_not_expected_for_nothing(chunk: int) -> None:
    """Beside streams all chunks may have one length, which does not tell their tokens from the fixed time of a step."""
    rng = random.Random(5)
    steps = [work(rng, prompts=False) for _ in range(300)]
    steps += [work(rng)._replace(tokens=chunk, pairs=chunk * rng.randrange(4000)) for _ in range(300)]
    assert fitted(TIMES, steps).times.step_s(8, 8000, 2048) > 0.8 * TIMES.step_s(8, 8000, 2048)


def few_experts(one: Work) -> float:
    """Seconds of a step: each row reads 8 of 32 experts, which are half of the fixed time."""
    return TIMES.step_s(*one) - TIMES.fixed_s / 2 * 0.75 ** (one.sequences + one.tokens)


@pytest.mark.parametrize("start", [StepTimes(), TIMES], ids=["unknown", "from the plan"])
@pytest.mark.parametrize("most", [1, 2, 4, 8, 12])
def test_few_sequences_do_not_make_many_look_slow(most: int, start: StepTimes) -> None:
    """Whoever expects many to be slow gets no more than few, and never learns that they are not."""
    rng, fit = random.Random(5), StepFit(start)

    def run(least: int, most: int, steps: int) -> None:
        for _ in range(steps):
            sequences = rng.randint(least, most)
            one = Work(sequences, sequences * rng.randint(4096, 4352))
            fit.add(one, few_experts(one) * rng.uniform(0.97, 1.03))

    many = Work(64, 64 * 4224)
    run(1, most, 500)
    assert fit.times.step_s(*many) < 1.25 * few_experts(many)
    run(16, 24, 16)
    assert fit.times.step_s(*many) < 1.25 * few_experts(many), (
        "the first steps that count are not mixed with the others"
    )
    run(16, 48, 150)
    assert fit.times.step_s(*many) == pytest.approx(few_experts(many), rel=0.1)
