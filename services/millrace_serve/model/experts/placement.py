"""The experts that each rank holds. No other module assumes an order of experts.

A rank has slots: slot s of a layer is row s of that layer's w13 and w2 on the rank. An expert may have several slots,
on several ranks; then the replicas take the rows of a step in turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from millrace_serve.model.parallel import check_divides


@dataclass(frozen=True, slots=True)
class Placement:
    """Letters: L layers, R ranks, S slots of a rank, E experts, X replicas of the expert that has most in a layer."""

    experts: np.ndarray  # int32 [L, R, S], the expert in each slot
    num_experts: int

    def __post_init__(self) -> None:
        every = np.arange(self.num_experts)
        for layer, held in enumerate(self.experts):
            assert np.array_equal(np.unique(held), every), f"layer {layer}: every expert needs a slot"

    @classmethod
    def contiguous(cls, num_layers: int, num_experts: int, num_ranks: int) -> Placement:
        """The same number of neighbouring experts on every rank. Raises ValueError if they do not divide."""
        held = check_divides("n_routed_experts", num_experts, "tp * dp", num_ranks)
        experts = np.arange(num_experts, dtype=np.int32).reshape(num_ranks, held)
        return cls(np.broadcast_to(experts, (num_layers, num_ranks, held)), num_experts)

    def slots_of_rank(self, layer: int, rank: int) -> list[int]:
        """The experts that the rank holds, by slot."""
        return self.experts[layer, rank].tolist()

    def logical_to_slot(self, layer: int, rank: int) -> np.ndarray:
        """int32 [X, E + 1]: row t of a step finds its expert e in slot [t % X, e] of this rank; -1: on another rank.

        The last column is for expert -1, the padding.
        """
        slots = self.experts.shape[2]
        replicas: list[list[int]] = [[] for _ in range(self.num_experts)]
        for place, expert in enumerate(self.experts[layer].flat):
            replicas[expert].append(place)
        turns = np.arange(max(map(len, replicas)))
        places = np.stack([np.take(of_expert, turns, mode="wrap") for of_expert in replicas], axis=1)
        local = np.where(places // slots == rank, places % slots, -1)
        return np.pad(local, ((0, 0), (0, 1)), constant_values=-1).astype(np.int32)


class SlotMap:
    """`Placement.logical_to_slot` on the device. Without replicas and with experts in the order of the slots, ids are
    returned as they are.
    """

    def __init__(self, placement: Placement, layer: int, rank: int, device: torch.device) -> None:
        table = placement.logical_to_slot(layer, rank)
        identity = len(table) == 1 and np.array_equal(table[0, :-1], np.arange(placement.num_experts))
        self._table = None if identity else torch.from_numpy(table).to(device)

    def __call__(self, ids: Tensor) -> Tensor:
        """Experts int32 [T, K], -1 for padding -> slots of this rank int32 [T, K], -1 for experts of other ranks."""
        if self._table is None:
            return ids
        if len(self._table) == 1:
            return self._table[0][ids]
        turn = torch.arange(len(ids), device=ids.device).unsqueeze(1) % len(self._table)
        return self._table[turn, ids]
