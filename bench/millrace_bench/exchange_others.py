"""The rivals of `millrace_bench.exchange`: NCCL, torch's symmetric memory, and DeepEP where its wheel is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from millrace_kernels.fp8 import quant_groups
from millrace_serve.model.experts.deepep_buffer import machines
from millrace_serve.model.parallel import ParallelDims
from torch import Tensor

Call = Callable[[], object]
MOST_LOW_LATENCY = 256  # rows
_buffers: dict[bool, Any] = {}  # of this process


class Case(NamedTuple):
    """As many rows on every rank."""

    dims: ParallelDims
    x: Tensor  # bfloat16 [T, D]
    gains: Tensor  # float32 [T, K]
    ids: Tensor  # int32 [T, K]
    experts: int


def gather(case: Case) -> dict[str, Call]:
    dims, x, gains, ids, _ = case

    def call() -> None:
        rows = dims.dp_all_gather(x)
        dims.dp_all_gather(gains)
        dims.dp_all_gather(ids)
        dims.dp_reduce_scatter(rows)

    return {"gather": call}


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
    dims, x, gains, ids, experts = case
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
    dims, x, gains, ids, experts = case
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
