"""Experts of a single replica (dp == 1): every rank has every token, and the sum over TP adds up the ranks' experts."""

from __future__ import annotations

import functools

from millrace_kernels.fp8 import Operand
from torch import Tensor

from millrace_serve.model.config import ModelConfig
from millrace_serve.model.experts.held import HeldExperts
from millrace_serve.model.experts.placement import Placement
from millrace_serve.model.experts.routed import Finish, RoutedExperts
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.weights import Weights


class LocalExperts(RoutedExperts):
    """The shared expert is one more row of w13 and w2 where it has the experts' size on this rank."""

    local, tp_partial = True, True

    def __init__(
        self, ckpt: Weights, config: ModelConfig, dims: ParallelDims, placement: Placement, layer: int
    ) -> None:
        sharded_alike = dims.tp == 1 or dims.expert_tp
        self.fuses_shared = ckpt.fp8 and config.n_shared_experts == 1 and sharded_alike
        self.held = HeldExperts(ckpt, config, dims, placement, layer, with_shared=self.fuses_shared)

    def begin(self, h: Operand, weights: Tensor, ids: Tensor, inputs: ForwardInput) -> Finish:
        return functools.partial(self.held, h, weights, ids)
