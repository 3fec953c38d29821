"""What `millrace_bench.exchange` times: our exchange (its ways, whether it is right, what waiting costs), and
its rivals: NCCL, torch's symmetric memory, and DeepEP where its wheel is installed.
"""

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from millrace_kernels.fp8 import quant_groups
from millrace_kernels.peer.exchange import Exchange, ExpertPlaces
from millrace_kernels.peer.signals import POLLS_PER_S
from millrace_kernels.rms_norm import rms_norm
from millrace_kernels.testing.tolerances import dequantised
from millrace_serve.engine.step.device import device_of
from millrace_serve.model.experts.deepep_buffer import machines
from millrace_serve.model.parallel import ParallelDims
from torch import Tensor

Call = Callable[[], object]
MOST_LOW_LATENCY = 256  # rows
_buffers: dict[bool, Any] = {}  # of this process


class Case(NamedTuple):
    dims: ParallelDims
    x: Tensor  # bfloat16 [T, D]
    gains: Tensor  # float32 [T, K]
    ids: Tensor  # int32 [T, K], -1 in padding
    experts: int
    counts: list[int]  # T of every rank

    def padded(self) -> "Case":
        """With as many rows on every rank as the longest one has."""
        most = max(self.counts)
        pad = (0, 0, 0, most - len(self.x))
        x, gains, ids = F.pad(self.x, pad), F.pad(self.gains, pad), F.pad(self.ids, pad, value=-1)
        return self._replace(x=x, gains=gains, ids=ids, counts=[most] * self.dims.dp)


def gather(case: Case) -> dict[str, Callable[[], Tensor]]:
    """gather: of the summed rows a rank gets its own; all_reduce: it gets all, and keeps its own."""
    dims = case.dims

    def gathered() -> Tensor:
        rows, *_ = map(dims.dp_all_gather, (case.x, case.gains, case.ids))
        return rows

    def all_reduce() -> Tensor:
        rows = gathered()
        dist.all_reduce(rows, group=dims.dp_group)
        return rows[dims.dp_rank]

    return {"gather": lambda: dims.dp_reduce_scatter(gathered()), "all_reduce": all_reduce}


def symm(case: Case) -> dict[str, Call]:
    """A copy into every rank's memory between two barriers, and torch's reduce-scatter."""
    import torch.distributed._symmetric_memory as symmetric

    dims, x = case.dims, case.x
    assert dims.dp_group is not None
    rows, name = (
        symmetric.empty((dims.dp * len(x), x.shape[1]), dtype=x.dtype, device=x.device),
        dims.dp_group.group_name,
    )
    rows.zero_()
    handle, own = symmetric.rendezvous(rows, dims.dp_group), torch.empty_like(x)
    places = [handle.get_buffer(rank, x.shape, x.dtype, dims.rank * x.numel()) for rank in range(dims.dp)]

    def call() -> None:
        handle.barrier()
        for place in places:
            place.copy_(x)
        handle.barrier()
        torch.ops.symm_mem.reduce_scatter_out(rows.view(-1), name, False, own.view(-1))

    return {"symm": call}


def deepep_ll(case: Case) -> dict[str, Call]:
    dims, x, gains, ids, experts, _ = case
    if len(x) > MOST_LOW_LATENCY:
        return {}
    buffer, ids = _buffer(case, low_latency=True), ids.long()
    shape = (experts // dims.dp, dims.dp * MOST_LOW_LATENCY, x.shape[1])
    results = torch.zeros(shape, dtype=torch.bfloat16, device=x.device)

    def call() -> None:
        _, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, MOST_LOW_LATENCY, experts, use_fp8=True)
        buffer.low_latency_combine(results, ids, gains, handle)

    return {"deepep_ll": call}


def deepep(case: Case) -> dict[str, Call]:
    dims, x, gains, ids, experts, _ = case
    buffer, ids = _buffer(case, low_latency=False), ids.long()
    results = torch.zeros(dims.dp * len(x), x.shape[1], dtype=torch.bfloat16, device=x.device)

    def call() -> None:
        per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(ids, experts)
        _, _, _, _, handle, _ = buffer.dispatch(
            tuple(quant_groups(x)),
            topk_idx=ids,
            topk_weights=gains,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=in_rank,
            num_tokens_per_expert=per_expert,
            num_worst_tokens=len(results),
        )
        buffer.combine(results, handle)

    return {"deepep": call}


def _buffer(case: Case, *, low_latency: bool) -> Any:
    if low_latency not in _buffers:
        missing = [machine.missing for machine in machines(case.dims) if machine.missing]
        if missing:
            raise RuntimeError(missing[0])
        from deep_ep import Buffer

        dims, experts, width = case.dims, case.experts, case.x.shape[1]
        if low_latency:
            size = Buffer.get_low_latency_rdma_size_hint(MOST_LOW_LATENCY, width, dims.dp, experts)
            made = Buffer(dims.dp_group, 0, size, low_latency_mode=True, num_qps_per_rank=experts // dims.dp)
        else:
            made = Buffer(dims.dp_group, 512 << 20, 0)
        _buffers[low_latency] = made
    return _buffers[low_latency]


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
        _, x, gains, ids, _, counts = given
        places, exchange = self.places, self.exchange
        weight = torch.ones(x.shape[1], dtype=x.dtype, device=self.device)
        dispatch = functools.partial(exchange.dispatch, x, gains, ids, places, counts, shared=True, quant=True)

        def both() -> Tensor:
            dispatch()
            return exchange.combine(ids, places, counts, shared=True)

        return {"dispatch": dispatch, "both": both, "both_norm": lambda: rms_norm(both(), x, weight, EPS, quant=True)}

    def right(self, given: Case) -> bool:
        """Whether sums are those of experts that multiply a row by their rank + 1."""
        dims, x, ids = given.dims, given.x, given.ids
        expected = torch.zeros(x.shape, device=self.device)
        own = self._compute(given)
        for rank in range(dims.dp):
            holds = (ids // HELD == rank).any(1, keepdim=True) | (rank == dims.rank)
            expected += torch.where(holds, (own * (rank + 1)).bfloat16().float(), 0.0)
        out = self.exchange.combine(ids, self.places, given.counts, shared=True)
        return torch.equal(out, expected.bfloat16())

    def _compute(self, given: Case) -> Tensor:
        """The experts' part of one exchange -> float32 [T, D], this rank's rows as they arrived."""
        dims, x, gains, ids, _, counts = given
        received = self.exchange.dispatch(x, gains, ids, self.places, counts, shared=True, quant=True)
        assert received.rows.fp8 is not None
        values, chosen = dequantised(received.rows.fp8), (received.slots >= 0).any(1, keepdim=True)
        received.partial.copy_(torch.where(chosen, values * (dims.rank + 1), torch.nan))
        return values[sum(counts[: dims.rank]) :][: len(x)]

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
