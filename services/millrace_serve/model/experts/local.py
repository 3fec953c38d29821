"""Experts of a single replica (dp == 1): every rank has every token, and the sum over TP adds up the ranks' experts."""

from millrace_kernels.fp8 import Operand
from torch import Tensor

from millrace_serve.model.experts.held import ExpertLayer, HeldExperts, fuses_shared
from millrace_serve.model.experts.routed import Finish, RoutedExperts
from millrace_serve.model.inputs import ForwardInput


class LocalExperts(RoutedExperts):
    """The shared expert is one more row of w13 and w2 where it can be."""

    local, tp_partial = True, True

    def __init__(self, layer: ExpertLayer) -> None:
        self.fuses_shared = fuses_shared(layer)
        self.held = HeldExperts(layer, with_shared=self.fuses_shared)

    def begin(self, h: Operand, weights: Tensor, ids: Tensor, inputs: ForwardInput) -> Finish:
        return lambda: self.held(h, weights, ids)
