"""Experts of several replicas by torch.distributed: all ranks see all tokens, a reduce-scatter adds up results."""

import torch
import torch.nn.functional as F
from millrace_kernels.fp8 import Operand
from torch import Tensor

from millrace_serve.model.experts.held import ExpertLayer, HeldExperts, fuses_shared
from millrace_serve.model.experts.routed import Finish, RoutedExperts
from millrace_serve.model.inputs import ForwardInput


class GatherExperts(RoutedExperts):
    """Rows are padded to the longest replica. The shared expert computes a rank's own rows beside the routed ones where
    it can. A step without any row has no collectives.
    """

    local, tp_partial = False, True

    def __init__(self, layer: ExpertLayer) -> None:
        self.dims, self.fuses_shared = layer.dims, fuses_shared(layer)
        self.held = HeldExperts(layer, with_shared=self.fuses_shared)

    def begin(self, h: Operand, weights: Tensor, ids: Tensor, inputs: ForwardInput) -> Finish:
        x, counts = h.plain, inputs.dp_num_tokens
        assert x is not None and len(counts) == self.dims.dp and counts[self.dims.dp_rank] == x.shape[0], counts
        if not max(counts):
            return lambda: x
        pad, gather = (0, 0, 0, max(counts) - x.shape[0]), self.dims.dp_all_gather
        arrived = gather(F.pad(x, pad)), gather(F.pad(weights, pad)), gather(F.pad(ids, pad, value=-1))

        def finish() -> Tensor:
            rows, shares, chosen = (each.flatten(0, 1) for each in arrived)
            partial = self._experts(rows, shares, chosen, max(counts)).unflatten(0, (self.dims.dp, -1))
            return self.dims.dp_reduce_scatter(partial)[: x.shape[0]]

        return finish

    def _experts(self, rows: Tensor, weights: Tensor, ids: Tensor, per_replica: int) -> Tensor:
        """As `held`, and of this replica's rows the shared expert too."""
        if not self.fuses_shared:
            return self.held(Operand(rows, None), weights, ids)
        first = self.dims.dp_rank * per_replica
        slots, out = F.pad(self.held.slots(ids), (0, 1), value=-1), torch.empty_like(rows)
        slots[first : first + per_replica, -1] = self.held.num_slots
        self.held.placed(Operand(rows, None), F.pad(weights, (0, 1), value=1.0), slots, out)
        return out
