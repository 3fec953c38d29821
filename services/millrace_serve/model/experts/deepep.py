"""Experts of several replicas by DeepEP, over NVLink inside a host and RDMA between hosts.

low latency   steps of few rows, as decode steps are: a row goes to each of its experts, and rows arrive by expert
normal        the others: a row goes once to each rank that holds one of its experts, and rows arrive by rank

The numbers of rows of all replicas, which every rank knows, choose the mode. Rows travel as FP8 to the experts and as
BF16 back. Neither mode waits for the host, and low latency runs in CUDA graphs.
"""

import numpy as np
import torch
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import Fp8, Operand, quant_groups
from millrace_kernels.moe_experts import expected_rows, moe_experts
from millrace_kernels.moe_masked import moe_masked
from torch import Tensor

from millrace_serve.model.experts.deepep_buffer import DeepEpBuffer
from millrace_serve.model.experts.held import ExpertLayer, HeldExperts
from millrace_serve.model.experts.routed import Finish, RoutedExperts
from millrace_serve.model.inputs import ForwardInput


class DeepEpExperts(RoutedExperts):
    local, fuses_shared, tp_partial = False, False, False
    captures_chunks = False  # nobody has tried normal mode in one

    def __init__(self, exchange: DeepEpBuffer, layer: ExpertLayer) -> None:
        self.exchange, self.dims = exchange, layer.dims
        self.held = HeldExperts(layer, with_shared=False)
        self.num_places = layer.placement.experts[layer.number].size
        table = layer.placement.places(layer.number)
        self._is_last = layer.number == layer.config.num_hidden_layers - 1
        self._in_order = len(table) == 1 and np.array_equal(table[0, :-1], np.arange(self.num_places))

    def begin(self, h: Operand, weights: Tensor, ids: Tensor, inputs: ForwardInput) -> Finish:
        x, counts = h.plain, inputs.dp_num_tokens
        assert x is not None and len(counts) == self.dims.dp and counts[self.dims.dp_rank] == x.shape[0], counts
        if not max(counts):
            return lambda: x
        places = self._places(ids)
        if max(counts) <= self.exchange.most_rows:
            return self._low_latency(x, weights, places, sum(counts))
        return self._normal(h.fp8 or quant_groups(x), weights, places, sum(counts))

    def _places(self, ids: Tensor) -> Tensor:
        """Experts int32 [T, K] -> int64 rank * slots + slot; -1 stays."""
        if self._in_order:
            return ids.long()
        table = self.held.slots.places
        turns = (torch.arange(len(ids), device=ids.device) + self.dims.dp_rank) % len(table)
        return table[turns.unsqueeze(1), ids].long()

    def _low_latency(self, x: Tensor, weights: Tensor, places: Tensor, num_rows: int) -> Finish:
        buffer, held = self.exchange.buffer, self.held
        rows, counts, handle, _, receive = buffer.low_latency_dispatch(
            x, places, self.exchange.most_rows, self.num_places, return_recv_hook=True
        )

        def finish() -> Tensor:
            receive()
            expected = expected_rows(num_rows, places.shape[1], held.num_experts)
            y = moe_masked(Fp8(*rows), counts, held.w13, held.w2, expected)
            out: Tensor = buffer.low_latency_combine(y, places, weights, handle)[0]
            if self._is_last:
                self.exchange.ask()
            return out

        return finish

    def _normal(self, x: Fp8, weights: Tensor, places: Tensor, num_rows: int) -> Finish:
        buffer, held = self.exchange.buffer, self.held
        per_rank, per_host, per_place, in_rank, _ = buffer.get_dispatch_layout(places, self.num_places)
        rows, slots, shares, _, handle, arrived = buffer.dispatch(
            tuple(x),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_host,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_place,
            topk_idx=places,
            topk_weights=weights,
            num_worst_tokens=max(num_rows, SMALL_TOKENS + 1),  # fewer rows would be wanted in their plain form
            async_finish=True,
        )

        def finish() -> Tensor:
            arrived.current_stream_wait()
            operand = Operand(None, Fp8(*rows))
            partial = moe_experts(operand, shares, slots.int(), held.w13, held.w2, num_experts=held.num_experts)
            out: Tensor = buffer.combine(partial, handle)[0]
            self.exchange.clean()
            return out

        return finish
