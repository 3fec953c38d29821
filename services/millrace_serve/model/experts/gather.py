"""Experts of several replicas by torch.distributed: all ranks see all tokens, a reduce-scatter adds up results."""

from __future__ import annotations

import torch.nn.functional as F
from millrace_kernels.fp8 import Operand
from torch import Tensor

from millrace_serve.model.config import ModelConfig
from millrace_serve.model.experts.held import HeldExperts
from millrace_serve.model.experts.placement import Placement
from millrace_serve.model.experts.routed import Finish, RoutedExperts
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.weights import Weights


class GatherExperts(RoutedExperts):
    """Rows are padded to the longest replica. A step without any row has no collectives."""

    local, fuses_shared, tp_partial = False, False, True

    def __init__(
        self, ckpt: Weights, config: ModelConfig, dims: ParallelDims, placement: Placement, layer: int
    ) -> None:
        self.dims = dims
        self.held = HeldExperts(ckpt, config, dims, placement, layer, with_shared=False)

    def begin(self, h: Operand, weights: Tensor, ids: Tensor, inputs: ForwardInput) -> Finish:
        x, counts = h.plain, inputs.dp_num_tokens
        assert x is not None and len(counts) == self.dims.dp and counts[self.dims.dp_rank] == x.shape[0], counts
        if not max(counts):
            return lambda: x
        pad, gather = (0, 0, 0, max(counts) - x.shape[0]), self.dims.dp_all_gather
        rows = Operand(gather(F.pad(x, pad)).flatten(0, 1), None)
        weights, ids = gather(F.pad(weights, pad)), gather(F.pad(ids, pad, value=-1))

        def finish() -> Tensor:
            partial = self.held(rows, weights.flatten(0, 1), ids.flatten(0, 1))
            return self.dims.dp_reduce_scatter(partial.unflatten(0, (self.dims.dp, -1)))[: x.shape[0]]

        return finish
