"""The rows of a step's choices of experts, as a route (moe_route.py) gives them to the kernels that compute experts."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class ExpertRoute(NamedTuple):
    """Letters: T tokens, C choices per token (top-k, and the shared expert), E experts held here."""

    rows: Tensor  # int32 [T, C], the row of each choice, -1 for a choice without one
    ends: Tensor  # int32 [E], one past each expert's last row
    total: Tensor  # int32 [1], one past the last row, padding included
    num_rows: int  # the most rows that there can be


class Blocks(NamedTuple):
    """The input of a kernel that gathers its own rows, valid up to `total`; blocks beyond are arbitrary."""

    tokens: Tensor  # int32 [num_rows], whose token a row is
    experts: Tensor  # int32 [num_rows / alignment], the expert of a block of `alignment` rows
    scales: Tensor | None  # float32 [D/128, num_rows], of the rows' FP8 groups
