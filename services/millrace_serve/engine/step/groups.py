"""The collectives of engine/step/lockstep.py over torch.distributed.

They run on the engine's thread while the model's collectives run on the runner's, so they have groups of their own.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from millrace_serve.engine.step.lockstep import AllGather, Broadcast, Lockstep, State
from millrace_serve.model.parallel import ParallelDims


def lockstep_of(dims: ParallelDims) -> Lockstep:
    """Collective over all ranks of `dims`."""
    all_gather = broadcast = None
    if dims.dp > 1:
        leaders = dist.new_group(range(0, dims.world, dims.tp), backend="gloo")
        all_gather = gather_over(leaders) if dims.tp_rank == 0 else None
    if dims.tp > 1:
        groups = [dist.new_group(range(d * dims.tp, (d + 1) * dims.tp), backend="gloo") for d in range(dims.dp)]
        broadcast = broadcast_over(groups[dims.dp_rank])
    return Lockstep(all_gather, broadcast)


def gather_over(group: dist.ProcessGroup) -> AllGather:
    size = dist.get_world_size(group)

    def all_gather(mine: State) -> list[State]:
        out = torch.empty(size * len(mine), dtype=torch.int64)
        dist.all_gather_into_tensor(out, torch.tensor(mine), group=group)
        return [(decode, chunks, tokens, last) for decode, chunks, tokens, last in out.view(size, -1).tolist()]

    return all_gather


def broadcast_over(group: dist.ProcessGroup) -> Broadcast:
    """Broadcast from the first rank of `group`; the size travels first."""
    leader = dist.get_global_rank(group, 0)

    def broadcast(data: bytes | None) -> bytes:
        size = torch.tensor([0 if data is None else len(data)])
        dist.broadcast(size, leader, group=group)
        if data is None:
            content = torch.empty(int(size), dtype=torch.uint8)
        else:
            content = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        dist.broadcast(content, leader, group=group)
        return content.numpy().tobytes()

    return broadcast
