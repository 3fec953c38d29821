"""Experts of several replicas on one host: rows and sums go through peer memory, without a collective."""

import torch
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import BLOCK, Fp8, Operand
from millrace_kernels.peer.exchange import Exchange, ExpertPlaces
from torch import Tensor

from millrace_serve.model.experts.held import ExpertLayer, HeldExperts, fuses_shared
from millrace_serve.model.experts.routed import Finish, RoutedExperts
from millrace_serve.model.inputs import ForwardInput


class PeerExperts(RoutedExperts):
    """Rows are sent in FP8 where the experts read FP8. The shared expert computes a rank's own rows beside the routed
    ones, where the rank holds all of it. A step without any row has no exchange.
    """

    local, tp_partial = False, True

    def __init__(self, exchange: Exchange, layer: ExpertLayer) -> None:
        self.exchange = exchange  # of all layers
        ckpt, config, dims, _, _ = layer
        self.fuses_shared = fuses_shared(layer)
        self.held = HeldExperts(layer, with_shared=self.fuses_shared)
        self.places = ExpertPlaces(self.held.slots.places, self.held.num_slots, dims.tp, dims.tp_rank)
        whole_blocks = config.hidden_size % BLOCK == 0 and config.moe_intermediate_size % BLOCK == 0
        self.fp8_rows = isinstance(self.held.w13, Fp8) and whole_blocks and ckpt.dtype == torch.bfloat16

    def begin(self, h: Operand, weights: Tensor, ids: Tensor, inputs: ForwardInput) -> Finish:
        x, counts, most = h.plain, inputs.dp_num_tokens, self.exchange.most_rows
        assert x is not None, "the gate reads plain rows too"
        if not max(counts):
            return lambda: x

        def send(first: int) -> Finish:
            rows, sizes = slice(first, first + most), [min(max(count - first, 0), most) for count in counts]
            return self._send(x[rows], weights[rows], ids[rows], sizes)

        sent = send(0)

        def finish() -> Tensor:
            parts = [sent(), *(send(first)() for first in range(most, max(counts), most))]
            return parts[0] if len(parts) == 1 else torch.cat(parts)

        return finish

    def _send(self, x: Tensor, weights: Tensor, ids: Tensor, counts: list[int]) -> Finish:
        exchange, places, shared = self.exchange, self.places, self.fuses_shared
        quant = self.fp8_rows and sum(counts) > SMALL_TOKENS
        received = exchange.dispatch(x, weights, ids, places, counts, quant=quant, shared=shared)

        def finish() -> Tensor:
            self.held.placed(received.rows, received.weights, received.slots, received.partial)
            return exchange.combine(ids, places, counts, shared=shared)

        return finish
