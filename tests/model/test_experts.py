"""Placements of experts, and that experts of any placement add up to those of one rank."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from millrace_kernels.fp8 import Operand
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.eplb.placement import ExpertPlacement, SlotMap
from millrace_serve.model.experts.held import ExpertLayer, HeldExperts
from millrace_serve.model.experts.local import LocalExperts
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.moe import Moe
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.weights import Checkpoint
from millrace_testing.examples import examples
from millrace_testing.tolerances import assert_close
from torch import Tensor

CPU = torch.device("cpu")
EXPERTS, LAYER = 16, 1


@st.composite
def placements(draw: st.DrawFn) -> ExpertPlacement:
    """One layer: the experts in any order, some of them more than once."""
    num, ranks = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    spare = -num % ranks + ranks * draw(st.integers(0, 2))
    more = draw(st.lists(st.integers(0, num - 1), min_size=spare, max_size=spare))
    experts = draw(st.permutations([*range(num), *more]))
    return ExpertPlacement(np.array(experts, np.int32).reshape(1, ranks, -1), num)


@examples(40)
@given(placements())
def test_one_slot_of_one_rank_serves_a_row(placement: ExpertPlacement) -> None:
    ranks = range(placement.experts.shape[1])
    tables = np.stack([placement.logical_to_slot(0, rank) for rank in ranks])
    assert (tables[:, :, -1] == -1).all() and tables.dtype == np.int32
    assert ((tables[:, :, :-1] >= 0).sum(axis=0) == 1).all()
    for rank in ranks:
        held, (turns, experts) = placement.experts[0, rank].tolist(), (tables[rank] >= 0).nonzero()
        assert [held[slot] for slot in tables[rank, turns, experts]] == experts.tolist()


@examples(40)
@given(placements())
def test_replicas_take_turns(placement: ExpertPlacement) -> None:
    """Every slot serves some row."""
    for rank in range(placement.experts.shape[1]):
        table = placement.logical_to_slot(0, rank)
        assert set(table[table >= 0]) == set(range(placement.experts.shape[2]))


@examples(40)
@given(placements(), st.data())
def test_device_maps_as_the_table(placement: ExpertPlacement, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, placement.experts.shape[1] - 1))
    ids = data.draw(st.lists(st.integers(-1, placement.num_experts - 1), min_size=6, max_size=6))
    found = SlotMap(placement, 0, rank, CPU)(torch.tensor(ids, dtype=torch.int32).view(3, 2))
    table = placement.logical_to_slot(0, rank)
    assert found.dtype == torch.int32
    assert found.tolist() == [[table[row % len(table), e] for e in ids[2 * row : 2 * row + 2]] for row in range(3)]


@examples(40)
@given(st.data())
def test_tables_change_where_they_are(data: st.DataObject) -> None:
    before = data.draw(placements().filter(lambda placement: placement.experts.size > placement.num_experts))
    mixed = data.draw(st.permutations(before.experts.ravel().tolist()))
    after = ExpertPlacement(np.array(mixed, np.int32).reshape(before.experts.shape), before.num_experts)
    slots = SlotMap(before, 0, 0, CPU)
    address, ids = slots.places.data_ptr(), torch.arange(-1, before.num_experts, dtype=torch.int32).unsqueeze(0)
    slots.update(after)
    assert slots.places.data_ptr() == address and slots.places.dtype == torch.int32
    assert slots.places.numpy().tolist() == after.places(0).tolist()
    assert slots(ids)[0, 1:].tolist() == after.logical_to_slot(0, 0)[0, :-1].tolist()


@examples(40)
@given(placements())
def test_replicas_share_evenly(placement: ExpertPlacement) -> None:
    counts = np.bincount(placement.places(0)[:, :-1].ravel())
    copies = np.bincount(placement.experts.ravel())[placement.experts.ravel()]
    assert (abs(counts - placement.num_turns / copies) < 1).all()


def test_all_experts_in_order_need_no_map() -> None:
    ids = torch.tensor([[3, -1]], dtype=torch.int32)
    assert SlotMap(ExpertPlacement.contiguous(2, 4, 1), 1, 0, CPU)(ids) is ids
    assert SlotMap(ExpertPlacement.contiguous(2, 4, 2), 1, 1, CPU)(ids).tolist() == [[1, -1]]


def test_contiguous_experts() -> None:
    placement = ExpertPlacement.contiguous(3, 6, 2)
    assert [placement.experts[2, rank].tolist() for rank in (0, 1)] == [[0, 1, 2], [3, 4, 5]]
    with pytest.raises(ValueError, match=r"n_routed_experts=6 .* tp \* dp=4"):
        ExpertPlacement.contiguous(3, 6, 4)


def test_spare_slots_begin_with_experts_of_the_next_rank() -> None:
    placement = ExpertPlacement.contiguous(1, 6, 3, 1)
    assert [placement.experts[0, rank].tolist() for rank in range(3)] == [[0, 1, 2], [2, 3, 4], [4, 5, 0]]
    with pytest.raises(ValueError, match="redundant_experts=1: other ranks have only 0 experts"):
        ExpertPlacement.contiguous(1, 6, 1, 1)


def test_expert_without_a_slot_is_a_mistake() -> None:
    with pytest.raises(AssertionError, match="layer 0: every expert needs a slot"):
        ExpertPlacement(np.array([[[0, 1], [1, 3]]], np.int32), 4)


def layout(name: str) -> ExpertPlacement:
    rng = np.random.default_rng(0)
    more = rng.choice(EXPERTS, 8) if name == "replicas" else np.arange(0)
    order = np.arange(EXPERTS) if name == "contiguous" else rng.permutation(np.concatenate([np.arange(EXPERTS), more]))
    return ExpertPlacement(np.broadcast_to(order.astype(np.int32).reshape(4, -1), (4, 4, len(order) // 4)), EXPERTS)


@pytest.mark.parametrize("name", ["contiguous", "shuffled", "replicas"])
def test_experts_of_the_ranks_add_up(name: str, random_bf16: Path) -> None:
    config = ModelConfig.load(random_bf16)
    rng = torch.Generator().manual_seed(0)
    h = Operand(torch.randn(9, config.hidden_size, generator=rng), None)
    ids = torch.rand(9, EXPERTS, generator=rng).argsort(dim=1)[:, : config.num_experts_per_tok].int()
    ids[4] = -1
    weights = torch.rand(ids.shape, generator=rng)

    def experts(placement: ExpertPlacement, dims: ParallelDims) -> HeldExperts:
        ckpt = Checkpoint(random_bf16, config, CPU, torch.float32)
        return HeldExperts(ExpertLayer(ckpt, config, dims, placement, LAYER), with_shared=False)

    whole = experts(ExpertPlacement.contiguous(4, EXPERTS, 1), ParallelDims())(h, weights, ids)
    parts = [experts(layout(name), ParallelDims(rank=rank, dp=4))(h, weights, ids) for rank in range(4)]
    assert (whole[4] == 0).all() and whole.count_nonzero() > 0
    assert_close(torch.stack(parts).sum(0), whole)


class Complete(LocalExperts):
    """An exchange whose result is summed over the ranks already."""

    tp_partial = False


class Doubling(ParallelDims):
    """Two TP ranks with equal parts."""

    def tp_all_reduce(self, x: Tensor) -> Tensor:
        return x * 2


@pytest.mark.parametrize("implementation", [LocalExperts, Complete])
def test_complete_result_is_not_summed_again(implementation: Any, random_bf16: Path) -> None:
    config = ModelConfig.load(random_bf16)
    ckpt, dims = Checkpoint(random_bf16, config, CPU, torch.float32), Doubling()
    placement = ExpertPlacement.contiguous(4, EXPERTS, 1)
    moe = Moe(
        ckpt, config, dims, lambda layer: implementation(ExpertLayer(ckpt, config, dims, placement, layer)), LAYER
    )
    h = Operand(torch.randn(3, config.hidden_size, generator=torch.Generator().manual_seed(0)), None)
    token_ids = torch.zeros(3, dtype=torch.int64)
    inputs = ForwardInput(token_ids, token_ids, token_ids, None, token_ids)  # type: ignore[arg-type]
    routed = moe.routed.begin(h, *moe.gate(h.plain, None), inputs)()  # type: ignore[arg-type]
    assert moe.shared_experts is not None
    shared = moe.shared_experts.partial(h)
    assert_close(moe(h, inputs), (1 if moe.tp_partial else 2) * shared + routed)
