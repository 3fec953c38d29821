"""What a split of replicas is expected to do: known cases, and what holds for every workload."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_common.split import Capacity, DutySplit, Slo, Workload, best, expect, splits
from millrace_common.step_times import EXPAND, StepTimes
from millrace_testing.examples import examples

TIMES = StepTimes(fixed_s=0.018, sequence_s=1e-4, key_s=2e-8, token_s=4.4e-5, pair_s=1e-9)
CAPACITY = Capacity(max_running=256, kv_tokens=600_000, chunk_tokens=2048, handover_s=0.01)
SLO = Slo(ttft_s=1.0, tpot_s=0.04)

times = st.builds(
    StepTimes,
    fixed_s=st.floats(0.001, 0.03),  # and a fit finds 0 for what its steps do not tell apart
    sequence_s=st.floats(0, 1e-3),
    key_s=st.floats(0, 1e-7),
    chunk_s=st.just(0.0) | st.floats(0, 0.02),
    token_s=st.just(0.0) | st.floats(1e-6, 1e-3),
    pair_s=st.floats(0, 1e-8),
)
workloads = st.builds(
    Workload, st.floats(1, 20_000), st.floats(1, 2000), st.floats(0.01, 500), st.just(0.0) | st.floats(0, 20_000)
)
slos = st.builds(Slo, st.floats(0.05, 10) | st.just(math.inf), st.floats(0.005, 0.2) | st.just(math.inf))
capacities = st.builds(
    Capacity, st.integers(1, 512), st.integers(1000, 10**7), st.sampled_from([256, 2048, 8192]), st.floats(0, 0.1)
)


def goodput(replicas: int, workload: Workload, slo: Slo, step: StepTimes, capacity: Capacity) -> float:
    return best(replicas, workload, slo, step, capacity)[0][1].goodput


@pytest.mark.parametrize(
    ("workload", "first"),
    [
        (Workload(4096, 256, 7.5), DutySplit(3, 1)),  # prompts are most of the work
        (Workload(4096, 64, 9.0), DutySplit(3, 1)),
        (Workload(256, 1024, 9.0), DutySplit(both=4)),  # streams are
    ],
)
def test_the_best_split_has_replicas_where_the_work_is(workload: Workload, first: DutySplit) -> None:
    assert best(4, workload, SLO, TIMES, CAPACITY)[0][0] == first


def test_a_split_that_lacks_a_phase_answers_nothing_or_little() -> None:
    assert expect(DutySplit(prefill=4), Workload(4096, 256, 5), SLO, TIMES, CAPACITY).goodput == 0
    full = expect(DutySplit(3, 1), Workload(1024, 512, 12), SLO, TIMES, CAPACITY)
    assert full.goodput < 1 and "KV pages" in full.why


def test_a_queue_grows_before_it_fails() -> None:
    found = [expect(DutySplit(2, 2), Workload(4096, 256, rate), SLO, TIMES, CAPACITY) for rate in (2, 6, 10, 14, 20)]
    assert [f.ttft_s for f in found] == sorted(f.ttft_s for f in found)
    parts = [f.goodput / rate for f, rate in zip(found, (2, 6, 10, 14, 20), strict=True)]
    assert parts == sorted(parts, reverse=True)
    assert found[0].served == 2 and found[-1].served < 20


def test_kinds_share_by_what_each_can_serve() -> None:
    mixed = expect(DutySplit(2, 1, 1), Workload(4096, 256, 6), SLO, TIMES, CAPACITY)
    assert mixed.goodput > 5.5
    assert expect(DutySplit(0, 0, 4), Workload(4096, 256, 3), SLO, TIMES, CAPACITY) == expect(
        DutySplit(0, 4, 0), Workload(4096, 256, 3), SLO, TIMES, CAPACITY
    )


def test_every_split_once() -> None:
    for replicas in range(1, 20):
        found = list(splits(replicas))
        assert len(set(found)) == len(found) == replicas and all(split.total == replicas for split in found)


@given(workloads, slos, times, capacities, st.integers(1, 12))
@examples(40)
def test_whatever_the_load_the_numbers_are_numbers(
    workload: Workload, slo: Slo, step: StepTimes, capacity: Capacity, replicas: int
) -> None:
    rows = best(replicas, workload, slo, step, capacity)
    assert len(rows) == replicas
    for _, expected in rows:
        assert 0 <= expected.goodput <= workload.rate * (1 + 1e-9)
        values = expected.ttft_s, expected.tpot_s, expected.served, expected.decode_sequences
        assert not any(math.isnan(value) or value < 0 for value in values) and expected.why
    assert [e.goodput for _, e in rows] == pytest.approx(sorted((e.goodput for _, e in rows), reverse=True), abs=1e-8)


@given(workloads, slos, times, capacities, st.integers(1, 12))
@examples(40)
def test_one_more_replica_is_never_worse(
    workload: Workload, slo: Slo, step: StepTimes, capacity: Capacity, replicas: int
) -> None:
    few, more = (goodput(n, workload, slo, step, capacity) for n in (replicas, replicas + 1))
    assert more >= few - 1e-6 * workload.rate


@given(workloads, slos, times, capacities, st.integers(1, 8), st.floats(1, 4), st.floats(1, 4))
@examples(40)
def test_higher_limits_are_never_worse(
    workload: Workload, slo: Slo, step: StepTimes, capacity: Capacity, replicas: int, first: float, each: float
) -> None:
    tight = goodput(replicas, workload, slo, step, capacity)
    loose = goodput(replicas, workload, Slo(slo.ttft_s * first, slo.tpot_s * each), step, capacity)
    assert loose >= tight - 1e-6 * workload.rate


@given(workloads, slos, times, capacities, st.integers(1, 8))
@examples(40)
def test_a_cached_prompt_is_never_worse(
    workload: Workload, slo: Slo, step: StepTimes, capacity: Capacity, replicas: int
) -> None:
    step = replace(step, token_s=max(step.token_s, 2 * EXPAND * step.pair_s))  # else a token is cheaper than its keys
    loads = (replace(workload, cached_tokens=share * workload.input_tokens) for share in (0, 0.5))
    cold, half = (goodput(replicas, load, slo, step, capacity) for load in loads)
    assert half >= cold - 1e-6 * workload.rate


def test_expected_says_why() -> None:
    slow = expect(DutySplit(1, 1), Workload(4096, 256, 1), Slo(1, 0.017), TIMES, CAPACITY)
    assert slow.goodput < 0.01 and "too long" in slow.why
