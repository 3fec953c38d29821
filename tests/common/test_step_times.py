"""The predicted time of a step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.step_times import StepTimes

TIMES = StepTimes(fixed_s=0.012, sequence_s=5e-5, key_s=4e-8, chunk_s=3e-3, token_s=8e-5, pair_s=2e-9)


def test_a_step_is_the_sum_of_its_parts() -> None:
    assert TIMES.step_s(10, 1000, 100, 5000) == pytest.approx(0.012 + 5e-4 + 4e-5 + 3e-3 + 8e-3 + 1e-5)
    assert TIMES.step_s(10, 1000) == pytest.approx(0.012 + 5e-4 + 4e-5)


def test_a_prompt_in_several_steps_pays_the_fixed_time_for_each() -> None:
    whole, cut = TIMES.prompt_s(4096), TIMES.prompt_s(4096, chunk=1024)
    assert cut - whole == pytest.approx(3 * (TIMES.fixed_s + TIMES.chunk_s))


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
    tokens = times.tokens_within(limit_s, sequences, keys, start)

    def took(count: int) -> float:
        return times.step_s(sequences, keys, count, count * (start + count / 2))

    assert tokens == 0 or took(tokens) <= limit_s * (1 + 1e-9)
    assert took(tokens + 1) > limit_s * (1 - 1e-9)
