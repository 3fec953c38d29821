"""How tokens reach the ranks that hold their experts, and how the results come back.

Every implementation keeps the same promise: `combine(experts(dispatch(x)))`, summed over the TP group, is the routed
output of this replica's own T tokens. Rows whose expert ids are -1 (padding) reach no expert.
"""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from millrace_kernels.fp8 import Operand
from torch import Tensor

from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.parallel import ParallelDims


class ExpertExchange(Protocol):
    local: bool  # a rank sees exactly its replica's own tokens

    def dispatch(
        self, h: Operand, weights: Tensor, experts: Tensor, inputs: ForwardInput
    ) -> tuple[Operand, Tensor, Tensor]:
        """h [T, D], weights float32 [T, K], experts int32 [T, K] -> the same of the G tokens that this rank sees."""
        ...

    def combine(self, partial: Tensor, inputs: ForwardInput) -> Tensor:
        """[G, D], this rank's experts only -> [T, D], to be summed over the TP group."""
        ...


class LocalExchange:
    """One replica: every rank already has every token."""

    local = True

    def dispatch(
        self, h: Operand, weights: Tensor, experts: Tensor, inputs: ForwardInput
    ) -> tuple[Operand, Tensor, Tensor]:
        return h, weights, experts

    def combine(self, partial: Tensor, inputs: ForwardInput) -> Tensor:
        return partial


class GatherExchange:
    """DP attention by torch.distributed: all-gather padded to the longest replica, then reduce-scatter."""

    local = False

    def __init__(self, dims: ParallelDims) -> None:
        self.dims = dims

    def dispatch(
        self, h: Operand, weights: Tensor, experts: Tensor, inputs: ForwardInput
    ) -> tuple[Operand, Tensor, Tensor]:
        x, counts = h.plain, inputs.dp_num_tokens
        assert x is not None and len(counts) == self.dims.dp and counts[self.dims.dp_rank] == x.shape[0], counts
        if not max(counts):
            return h, weights, experts
        pad = (0, 0, 0, max(counts) - x.shape[0])
        gather = self.dims.dp_all_gather
        return (
            Operand(gather(F.pad(x, pad)).flatten(0, 1), None),
            gather(F.pad(weights, pad)).flatten(0, 1),
            gather(F.pad(experts, pad, value=-1)).flatten(0, 1),
        )

    def combine(self, partial: Tensor, inputs: ForwardInput) -> Tensor:
        counts = inputs.dp_num_tokens
        if not max(counts):
            return partial
        summed = self.dims.dp_reduce_scatter(partial.unflatten(0, (self.dims.dp, -1)))
        return summed[: counts[self.dims.dp_rank]]


def make_exchange(dims: ParallelDims) -> ExpertExchange:
    return LocalExchange() if dims.dp == 1 else GatherExchange(dims)
