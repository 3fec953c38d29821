"""Lengths, prompts and arrivals."""

from __future__ import annotations

import itertools
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_bench.workload import Lengths, SharedPrefix, Workload, poisson_arrivals


def workload(**changes: Any) -> Workload:
    defaults: dict[str, Any] = {
        "input_len": Lengths.parse("100"),
        "output_len": Lengths.parse("10"),
        "prefix": SharedPrefix(0, 0),
        "vocab_size": 500,
        "max_context": 4096,
        "seed": 1,
    }
    return Workload(**{**defaults, **changes})


@given(st.sampled_from(["7", "1:9", "lognormal:100:1.5", "3:3"]), st.integers(0, 2**32), st.integers(1, 1000))
def test_lengths_stay_in_range(text: str, seed: int, limit: int) -> None:
    assert 1 <= Lengths.parse(text).draw(Random(seed), limit) <= limit


def test_uniform_reaches_both_ends() -> None:
    lengths, rng = Lengths.parse("2:4"), Random(0)
    assert {lengths.draw(rng, 100) for _ in range(100)} == {2, 3, 4}


def test_lognormal_has_its_median() -> None:
    lengths, rng = Lengths.parse("lognormal:200:0.5"), Random(0)
    drawn = sorted(lengths.draw(rng, 10**6) for _ in range(2001))
    assert 180 < drawn[1000] < 220


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-3", "5:2", "1:2:3:4", "normal:3:4", "lognormal:0:1", "lognormal:9:-1", "1.5"]
)
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="length"):
        Lengths.parse(text)


@pytest.mark.parametrize("text", ["", "0.5", "2:10", "-1:10", "0.5:-1", "a:b"])
def test_bad_prefixes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        SharedPrefix.parse(text)


def test_same_seed_same_jobs_and_another_seed_others() -> None:
    assert workload().jobs(5) == workload().jobs(5)
    assert workload().jobs(5) != workload(seed=2).jobs(5)


def test_tokens_are_of_the_vocabulary_and_fit_the_context() -> None:
    for job in workload(vocab_size=3, input_len=Lengths.parse("1:300"), max_context=64).jobs(50):
        assert set(job.prompt) <= {0, 1, 2}
        assert 1 <= len(job.prompt) <= 64 - job.max_tokens


def test_text_prompts_have_a_word_per_token() -> None:
    (job,) = workload(vocab_size=0).jobs(1)
    assert len(job.prompt.split()) == 100


def test_shared_prefix_of_that_fraction() -> None:
    jobs = workload(prefix=SharedPrefix(0.5, 40)).jobs(200)
    beginnings = [tuple(job.prompt[:40]) for job in jobs]
    most_common = max(set(beginnings), key=beginnings.count)
    assert 70 < beginnings.count(most_common) < 130
    assert len({tuple(job.prompt[40:]) for job in jobs}) == 200
    assert {len(job.prompt) for job in jobs} == {100}


def test_arrivals_ascend_with_the_rate() -> None:
    times = list(itertools.islice(poisson_arrivals(50.0, 7), 5001))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 95 < times[-1] < 105
