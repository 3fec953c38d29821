"""Placements made from loads."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from millrace_serve.model.eplb.balance import LEAST_GAIN, imbalance, rebalance
from millrace_serve.model.eplb.moving import moves_between
from millrace_serve.model.eplb.placement import ExpertPlacement
from millrace_testing.examples import examples

Case = tuple[np.ndarray, ExpertPlacement]  # loads, placement before


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ranks = draw(st.sampled_from([1, 2, 3, 4, 6, 9]))
    experts = ranks * draw(st.integers(1, 12))
    spare = draw(st.integers(0, min(2, experts - experts // ranks)))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    loads = rng.integers(0, draw(st.sampled_from([1, 3, 1000])), (2, experts))
    loads[rng.random(loads.shape) < 0.3] *= draw(st.sampled_from([0, 1, 20]))
    more = rng.integers(0, experts, (2, ranks * spare))
    every = np.concatenate([np.broadcast_to(np.arange(experts), (2, experts)), more], axis=1)
    held = rng.permuted(every, axis=1).reshape(2, ranks, -1).astype(np.int32)
    return loads, ExpertPlacement(held, experts)


@examples(40)
@given(cases())
def test_no_layer_becomes_worse(case: Case) -> None:
    """That every expert has a slot is checked by Placement itself."""
    loads, before = case
    after = rebalance(*case)
    assert after.experts.shape == before.experts.shape and after.experts.dtype == np.int32
    assert (imbalance(loads, after) <= imbalance(loads, before)).all()
    assert (rebalance(*case).experts == after.experts).all()


@examples(40)
@given(cases())
def test_layer_without_gain_stays(case: Case) -> None:
    loads, before = case
    after = rebalance(*case)
    gained = imbalance(loads, after) < imbalance(loads, before) * (1 - LEAST_GAIN)
    assert gained.tolist() == (after.experts != before.experts).any(axis=(1, 2)).tolist()
    assert (rebalance(loads, after).experts[~gained] == before.experts[~gained]).all()


@examples(40)
@given(cases())
def test_moves_lead_from_one_placement_to_the_other(case: Case) -> None:
    before, after = case[1].experts[0], rebalance(*case).experts[0]
    moves, found, slots = moves_between(before, after), before.copy(), before.shape[1]
    for source, target in moves:
        found.flat[target] = before.flat[source]
        assert source // slots == target // slots or found.flat[target] not in before[target // slots], "it was there"
    assert (found == after).all() and len(moves) == (before != after).sum()


def test_what_stays_on_a_rank_keeps_its_slot() -> None:
    before = ExpertPlacement.contiguous(1, 8, 2, 1)
    after = rebalance(np.array([[8, 0, 0, 8, 1, 1, 1, 1]]), before).experts[0]
    for old, new in zip(before.experts[0], after, strict=True):
        kept = set(old) & set(new)
        assert len(kept) >= 2 and all(new[slot] == expert for slot, expert in enumerate(old) if expert in kept)


def test_expert_with_half_of_the_tokens_is_shared() -> None:
    loads = np.array([[600, 100, 100, 100, 100, 100, 50, 50]])
    before = ExpertPlacement.contiguous(1, 8, 4, 1)
    after = rebalance(loads, before)
    assert (after.experts == 0).sum() >= 3
    assert imbalance(loads, before)[0] > 1.4 and imbalance(loads, after)[0] < 1.1


def test_hot_rank_without_spare_slots_is_relieved() -> None:
    loads = np.array([[40, 30, 20, 10, 4, 3, 2, 1]])
    before = ExpertPlacement.contiguous(1, 8, 2)
    after = rebalance(loads, before)
    assert imbalance(loads, before)[0] > 1.8 and imbalance(loads, after)[0] < 1.05


def test_even_load_moves_nothing() -> None:
    before = ExpertPlacement.contiguous(2, 16, 4)
    assert rebalance(np.full((2, 16), 7), before).experts.tolist() == before.experts.tolist()
    assert imbalance(np.zeros((2, 16)), before).tolist() == [1, 1]
