"""Where a rank finds the experts that rows have chosen."""

import torch
from torch import Tensor

from millrace_kernels.backend import implementation


def expert_slots(ids: Tensor, table: Tensor) -> Tensor:
    """ids int32 [T, K], -1 for padding; table int32 [X, E + 1], the last column for padding -> int32 [T, K].

    Row t takes row t % X of the table, so replicas of an expert take turns.
    """
    if run := implementation("expert_slots.expert_slots", ids.device, ids.shape[0]):
        return run(ids, table)
    turn = torch.arange(len(ids), device=ids.device).unsqueeze(1) % len(table)
    return table[turn, ids]
