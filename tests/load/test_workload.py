"""Lengths, times, prompts and arrivals."""

import itertools
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_load.workload import Distribution, SharedPrefix, Workload, WorkloadError, poisson_arrivals


def workload(**changes: Any) -> Workload:
    defaults: dict[str, Any] = {
        "turns": 1,
        "input_len": Distribution.lengths("100"),
        "output_len": Distribution.lengths("10"),
        "think": Distribution.times("0"),
        "prefix": SharedPrefix(0, 0),
        "vocab_size": 500,
        "max_context": 4096,
        "seed": 1,
    }
    return Workload(**{**defaults, **changes})


@given(st.sampled_from(["7", "1:9", "lognormal:100:1.5", "3:3"]), st.integers(0, 2**32))
def test_lengths_start_at_1(text: str, seed: int) -> None:
    assert Distribution.lengths(text).length(Random(seed)) >= 1


def test_uniform_reaches_both_ends() -> None:
    lengths, rng = Distribution.lengths("2:4"), Random(0)
    assert {lengths.length(rng) for _ in range(100)} == {2, 3, 4}


def test_lognormal_has_its_median() -> None:
    lengths, rng = Distribution.lengths("lognormal:200:0.5"), Random(0)
    drawn = sorted(lengths.length(rng) for _ in range(2001))
    assert 180 < drawn[1000] < 220


@pytest.mark.parametrize(
    "text", ["", "x", "0", "-3", "5:2", "1:2:3:4", "normal:3:4", "lognormal:0:1", "lognormal:9:-1", "1.5"]
)
def test_bad_lengths_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="length"):
        Distribution.lengths(text)


@pytest.mark.parametrize(("text", "low", "high"), [("0", 0, 0), ("1.5", 1.5, 1.5), ("0.1:0.2", 0.1, 0.2)])
def test_times_may_be_fractions(text: str, low: float, high: float) -> None:
    assert low <= Distribution.times(text).seconds(Random(0)) <= high


@pytest.mark.parametrize("text", ["", "-1", "2:1", "lognormal:0:1", "nan", "inf", "1:inf"])
def test_bad_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="time"):
        Distribution.times(text)


@pytest.mark.parametrize("text", ["", "0.5", "2:10", "-1:10", "0.5:-1", "a:b"])
def test_bad_prefixes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="prefix"):
        SharedPrefix.parse(text)


def test_same_seed_same_plan_and_another_seed_another() -> None:
    assert workload(turns=3).plan(5) == workload(turns=3).plan(5)
    assert workload().plan(5) != workload(seed=2).plan(5)


def test_tokens_are_of_the_vocabulary_and_fit_the_context() -> None:
    plan = workload(vocab_size=3, input_len=Distribution.lengths("1:300"), max_context=64).plan(50)
    assert plan.num_requests == 50
    for conversation in plan.conversations:
        (turn,) = conversation.turns
        assert set(turn.said) <= {0, 1, 2}
        assert 1 <= len(turn.said) <= 64 - turn.max_tokens


def test_text_prompts_have_a_word_per_token_also_where_they_meet() -> None:
    (conversation,) = workload(vocab_size=0, turns=2).plan(1).conversations
    first, second = (turn.said for turn in conversation.turns)
    assert len(first.split()) == len(second.split()) == 100 and len((first + second).split()) == 200


def test_shared_prefix_comes_before_that_fraction() -> None:
    plan = workload(turns=2, prefix=SharedPrefix(0.5, 40)).plan(200)
    firsts = [item.turns[0].said for item in plan.conversations]
    shared = max((said[:40] for said in firsts), key=[said[:40] for said in firsts].count)
    having = [said for said in firsts if said[:40] == shared]
    assert 70 < len(having) < 130
    assert {len(said) for said in having} == {140} and {len(said) for said in firsts} == {100, 140}
    assert {len(item.turns[1].said) for item in plan.conversations} == {100}
    assert len({tuple(said[40:]) for said in firsts}) == 200


def test_a_prefix_that_fills_the_context_is_refused() -> None:
    with pytest.raises(WorkloadError, match="shared prefix of 4095 tokens: the model's context of 4096 has room for"):
        workload(prefix=SharedPrefix(1, 4095)).plan(1)


def test_a_conversation_ends_before_the_turn_that_does_not_fit() -> None:
    plan = workload(turns=9, max_context=400).plan(2)
    assert [len(item.turns) for item in plan.conversations] == [3, 3]
    assert (plan.num_requests, plan.left_out) == (6, 12)


def test_think_time_is_between_turns() -> None:
    plan = workload(turns=3, think=Distribution.times("1:2")).plan(20)
    for conversation in plan.conversations:
        first, *later = (turn.think_s for turn in conversation.turns)
        assert first == 0 and all(1 <= time <= 2 for time in later)


def test_arrivals_ascend_with_the_rate() -> None:
    times = list(itertools.islice(poisson_arrivals(50.0, 7), 5001))
    assert times[0] == 0.0
    assert times == sorted(times)
    assert 95 < times[-1] < 105


def test_a_plan_with_arrivals_is_otherwise_the_same() -> None:
    plan = workload().plan(4)
    arriving = plan.arriving(10.0, seed=3)
    assert [item.start_s for item in plan.conversations] == [None] * 4
    assert [item.start_s for item in arriving.conversations] == list(itertools.islice(poisson_arrivals(10.0, 3), 4))
    assert [item.turns for item in arriving.conversations] == [item.turns for item in plan.conversations]
