"""The experts that each rank holds. No other module assumes an order of experts.

A rank has slots: slot s of a layer is row s of that layer's w13 and w2 on the rank. An expert may have several slots,
on several ranks; then the replicas take the rows of a step in turns.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np
import torch
from millrace_kernels.expert_slots import expert_slots
from torch import Tensor

from millrace_serve.model.parallel import check_divides

EVEN_TURNS = 24  # 2, 3, 4, 6 and 8 replicas of an expert divide it, so each of them gets equally many rows


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Letters: L layers, R ranks, S slots of a rank, E experts, X turns of replicas."""

    experts: np.ndarray  # int32 [L, R, S], the expert in each slot
    num_experts: int

    def __post_init__(self) -> None:
        every = np.arange(self.num_experts)
        for layer, held in enumerate(self.experts):
            assert np.array_equal(np.unique(held), every), f"layer {layer}: every expert needs a slot"

    @classmethod
    def contiguous(cls, num_layers: int, num_experts: int, num_ranks: int, num_spare: int = 0) -> Self:
        """The same number of neighbouring experts on every rank; its spare slots hold the first ones of the next rank.

        Raises:
            ValueError: the experts do not divide by the ranks, or there is nothing to put into the spare slots.
        """
        held = check_divides("n_routed_experts", num_experts, "tp * dp", num_ranks)
        if num_spare > num_experts - held:
            raise ValueError(f"redundant_experts={num_spare}: other ranks have only {num_experts - held} experts")
        first = np.arange(num_ranks, dtype=np.int32)[:, None] * held
        experts = (first + np.arange(held + num_spare, dtype=np.int32)) % num_experts
        return cls(np.broadcast_to(experts, (num_layers, *experts.shape)), num_experts)

    @property
    def num_turns(self) -> int:
        """X, which depends on the numbers of slots and experts alone, so that a rebalance changes no shape."""
        copies = self.experts[0].size - self.num_experts
        return max(copies + 1, EVEN_TURNS) if copies else 1

    def places(self, layer: int) -> np.ndarray:
        """int32 [X, E + 1]: row t of a step finds its expert e at place [t % X, e], which is rank * S + slot.

        t counts the rows of all replicas in the order in which their ranks compute them. The last column is -1: it is
        for expert -1, the padding.
        """
        held = self.experts[layer].ravel()
        order = held.argsort(kind="stable")  # places sorted by expert
        copies = np.bincount(held, minlength=self.num_experts)
        turns = np.arange(self.num_turns)[:, None] % copies
        found = order[copies.cumsum() - copies + turns]
        return np.pad(found, ((0, 0), (0, 1)), constant_values=-1).astype(np.int32)

    def logical_to_slot(self, layer: int, rank: int) -> np.ndarray:
        """int32 [X, E + 1]: `places` as slots of this rank; -1: on another rank."""
        places, slots = self.places(layer), self.experts.shape[2]
        return np.where((places >= 0) & (places // slots == rank), places % slots, -1).astype(np.int32)


class SlotMap:
    """`ExpertPlacement.places` and `logical_to_slot` on the device, at addresses that never change.

    Without replicas and with experts in the order of the slots, ids are returned as they are.
    """

    WEIGHTS = "places", "_table"  # experts that other weights bring are back on their first ranks

    places: Tensor  # int32 [X, E + 1]

    def __init__(self, placement: ExpertPlacement, layer: int, rank: int, device: torch.device) -> None:
        table = placement.logical_to_slot(layer, rank)
        identity = len(table) == 1 and np.array_equal(table[0, :-1], np.arange(placement.num_experts))
        self.places = torch.from_numpy(placement.places(layer)).to(device)
        self._layer, self._rank = layer, rank
        self._table = None if identity else torch.from_numpy(table).to(device)

    def update(self, placement: ExpertPlacement) -> None:
        """Takes another placement of the same shape, in the order of the stream."""
        assert self._table is not None, "nothing can move"
        self.places.copy_(torch.from_numpy(placement.places(self._layer)), non_blocking=True)
        slots = placement.logical_to_slot(self._layer, self._rank)
        self._table.copy_(torch.from_numpy(slots), non_blocking=True)

    def __call__(self, ids: Tensor) -> Tensor:
        """Experts int32 [T, K], -1 for padding -> slots of this rank int32 [T, K], -1 for experts of other ranks."""
        return ids if self._table is None else expert_slots(ids, self._table)
