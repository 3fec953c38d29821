"""The predicted time of a step."""

from dataclasses import astuple, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.step_times import StepTimes, chunk_pairs

TIMES = StepTimes(fixed_s=0.012, sequence_s=5e-5, key_s=4e-8, chunk_s=3e-3, token_s=8e-5, pair_s=2e-9)


def test_a_step_is_the_sum_of_its_parts() -> None:
    assert TIMES.step_s(10, 1000, 100, 5000) == pytest.approx(0.012 + 5e-4 + 4e-5 + 3e-3 + 8e-3 + 1e-5)
    assert TIMES.step_s(10, 1000) == pytest.approx(0.012 + 5e-4 + 4e-5)


@pytest.mark.parametrize(("start", "chunk"), [(0, 64), (0, 1024), (50_000, 128), (50_000, 2048)])
def test_a_prompt_in_several_steps_takes_the_sum_of_them(start: int, chunk: int) -> None:
    steps = [TIMES.step_s(tokens=chunk, pairs=chunk_pairs(at, chunk)) for at in range(start, start + 4096, chunk)]
    assert TIMES.prompt_s(4096, start, chunk) == pytest.approx(sum(steps))


@given(
    limit_s=st.floats(0.001, 0.5),
    sequences=st.integers(0, 256),
    keys=st.integers(0, 1_000_000),
    start=st.integers(0, 100_000),
    pair_s=st.sampled_from((0.0, 1e-12, 2e-9, 1e-7)),
)
def test_tokens_within_a_limit_are_the_most_that_fit(
    limit_s: float, sequences: int, keys: int, start: int, pair_s: float
) -> None:
    times = replace(TIMES, pair_s=pair_s)
    tokens = times.fits(limit_s - times.step_s(sequences, keys) - times.chunk_s, start)

    def took(count: int) -> float:
        return times.step_s(sequences, keys, count, chunk_pairs(start, count))

    assert tokens == 0 or took(tokens) <= limit_s * (1 + 1e-9)
    assert took(tokens + 1) > limit_s * (1 - 1e-9)


@given(
    times=st.builds(StepTimes, *(st.sampled_from((0.0, part)) for part in astuple(replace(TIMES, pair_s=2e-9)))),
    prompts=st.lists(st.tuples(st.sampled_from((0, 64, 50_000)), st.integers(1, 20_000)), max_size=4),
    left=st.integers(0, 2048),
    spare=st.sampled_from((-0.4, 0.0, 0.1)),
    sequences=st.sampled_from((0, 100)),
)
def test_parts_of_a_step_that_cost_nothing_are_no_fault(
    times: StepTimes, prompts: list[tuple[int, int]], left: int, spare: float, sequences: int
) -> None:
    """A fit finds 0 for what its steps do not tell apart."""
    shares = times.divide(prompts, left, 2048)
    assert sum(shares) <= left and all(0 <= share <= rest for share, (_, rest) in zip(shares, prompts, strict=True))
    assert sum(shares) > 0 or not prompts or not left
    for start, rest in prompts:
        keys = 1000 * sequences
        assert times.beside(0.04, spare, sequences, keys, start, rest, 64)[0] >= 0
        assert times.prompts_s(rest, rest * start) >= 0
        assert times.prompt_s(rest, start, 2048) >= 0 and 0 < times.chunk_alone(start, 2048) <= 2048
