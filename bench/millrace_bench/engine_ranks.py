"""A few ranks of a larger tensor-parallel group, each with an engine of its own that takes the same steps.

The weights have the shapes of `tp` ranks, and sums go over those ranks that are there. Equal requests and equal sampled
tokens make equal steps, so no rank needs to be told what another does.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.reduce import Fused, fused_reduce
from torch import Tensor

from millrace_bench.shard import SHARDS, Shard


@dataclass(frozen=True, slots=True)
class SomeRanks(ParallelDims):
    """`tp_group` has some of the `tp` ranks; their parts stand for those of the others."""

    def tp_all_gather(self, x: Tensor) -> Tensor:
        there = dist.get_world_size(self.tp_group)
        parts = [torch.empty_like(x) for _ in range(there)]
        dist.all_gather(parts, x.contiguous(), group=self.tp_group)
        return torch.stack(parts).repeat(self.tp // there, *[1] * x.dim())


def shard_of(name: str, joined: ParallelDims | None) -> Shard:
    """The shard, whose sums go over the ranks of `joined`, or over none."""
    shard = SHARDS[name]
    if joined is None:
        return shard
    dims = SomeRanks(rank=joined.rank, tp=shard.dims.tp, expert_tp=shard.dims.expert_tp, tp_group=joined.tp_group)
    return replace(shard, dims=dims)


def fused_of(model: DeepseekV3, joined: ParallelDims, device: torch.device, num_rows: int) -> Fused | None:
    """The kernel for sums over the ranks of `joined` of at most so many rows; None on a CPU."""
    where = torch.device("cuda", joined.rank) if device.type == "cuda" else device
    return fused_reduce(joined, num_rows, model.config.hidden_size, where, model.dtype)
