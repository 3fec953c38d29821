"""Our exchange for `millrace_bench.exchange`: its ways, whether it is right, and what waiting costs."""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from millrace_kernels.fp8 import Operand
from millrace_kernels.peer.exchange import Exchange, ExpertPlaces, Received
from millrace_kernels.peer.signals import POLLS_PER_S
from millrace_kernels.rms_norm import rms_norm
from millrace_kernels.testing.tolerances import dequantised
from millrace_serve.engine.step.device import device_of
from millrace_serve.model.parallel import ParallelDims
from torch import Tensor

from millrace_bench.exchange_others import Call, Case

TOP_K, HELD, EPS = 8, 32, 1e-6


class Ours:
    """The buffers of this process."""

    def __init__(self, args: argparse.Namespace, dims: ParallelDims, device: torch.device) -> None:
        assert dims.dp_group is not None
        self.args, self.dims, self.device = args, dims, device
        self.exchange = Exchange(dims.dp_group, device, max(args.rows), args.width, TOP_K + 1, torch.bfloat16)
        table = torch.arange(HELD * dims.dp + 1, dtype=torch.int32, device=device)
        table[-1] = -1
        self.places = ExpertPlaces(table[None], HELD)

    def ways(self, given: Case) -> dict[str, Call]:
        dims, x, gains, ids, _ = given
        counts, places, exchange = [len(x)] * dims.dp, self.places, self.exchange
        weight = torch.ones(x.shape[1], dtype=x.dtype, device=self.device)

        def dispatch() -> Received:
            return exchange.dispatch(x, gains, ids, places, counts, shared=True, quant=True)

        def both() -> Tensor:
            dispatch()
            return exchange.combine(ids, places, counts, shared=True)

        def norm() -> tuple[Operand, Tensor]:
            return rms_norm(both(), x, weight, EPS, quant=True)

        return {"dispatch": dispatch, "both": both, "both_norm": norm}

    def right(self, given: Case) -> bool:
        """Whether sums are those of experts that multiply a row by their rank + 1."""
        dims, x, ids = given.dims, given.x, given.ids
        counts, expected = [len(x)] * dims.dp, torch.zeros(x.shape, device=self.device)
        own = self._compute(given)
        for rank in range(dims.dp):
            holds = (ids // HELD == rank).any(1, keepdim=True) | (rank == dims.rank)
            expected += torch.where(holds, (own * (rank + 1)).bfloat16().float(), 0.0)
        out = self.exchange.combine(ids, self.places, counts, shared=True)
        return torch.equal(out, expected.bfloat16())

    def _compute(self, given: Case) -> Tensor:
        """The experts' part of one exchange -> float32 [T, D], this rank's rows as they arrived."""
        dims, x, gains, ids, _ = given
        received = self.exchange.dispatch(x, gains, ids, self.places, [len(x)] * dims.dp, shared=True, quant=True)
        assert received.rows.fp8 is not None
        values, chosen = dequantised(received.rows.fp8), (received.slots >= 0).any(1, keepdim=True)
        received.partial.copy_(torch.where(chosen, values * (dims.rank + 1), torch.nan))
        return values[dims.rank * len(x) :][: len(x)]

    def poll_us(self) -> float:
        """Of rank 0, whose last dispatch nobody answers."""
        self.exchange.answer_within(self.args.polls / POLLS_PER_S)
        x, ids = torch.zeros(1, self.args.width).bfloat16().to(self.device), torch.zeros(1, TOP_K, dtype=torch.int32)
        counts, ids, began = [1] * self.dims.dp, ids.to(self.device), 0.0
        for _ in range(2 - min(self.dims.rank, 1)):
            device_of(self.device).synchronize()
            began = time.perf_counter()
            self.exchange.dispatch(x, ids.float(), ids, self.places, counts, shared=True, quant=True)
            device_of(self.device).synchronize()
        taken = time.perf_counter() - began
        dist.barrier()
        return round(taken / self.args.polls * 1e6, 3)
