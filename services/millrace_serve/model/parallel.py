"""The place of a rank, and its groups. R ranks = dp replicas x tp ranks; rank = dp_rank * tp + tp_rank.

attention heads, shared expert, embedding, LM head               sharded over tp
dense MLPs                                                       sharded over tp, or over dense_tp of its ranks
routed experts                                                   whole ones spread over all R ranks; or, expert_tp,
                                                                 each sharded over tp (dp == 1 only)
requests                                                         belong to one replica
"""

import datetime
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of the host


@dataclass(frozen=True, slots=True)
class ParallelDims:
    rank: int = 0
    tp: int = 1
    dp: int = 1
    expert_tp: bool = False
    dense_tp: int = 0  # ranks that share a dense MLP, of which there are tp / dense_tp copies; 0: all tp
    redundant_experts: int = 0  # slots of a rank and layer for replicas of experts; 0: experts never move
    world_group: dist.ProcessGroup | None = None  # all R ranks; None when R == 1
    tp_group: dist.ProcessGroup | None = None  # ranks of this replica; None when tp == 1
    dp_group: dist.ProcessGroup | None = None  # same tp_rank of every replica; None when dp == 1

    @property
    def world(self) -> int:
        return self.tp * self.dp

    @property
    def tp_rank(self) -> int:
        return self.rank % self.tp

    @property
    def dp_rank(self) -> int:
        return self.rank // self.tp

    @property
    def ep_size(self) -> int:
        """Number of ranks that share the experts: with `expert_tp` each has a part of all of them."""
        return 1 if self.expert_tp else self.world

    @property
    def ep_rank(self) -> int:
        return 0 if self.expert_tp else self.rank

    def tp_all_reduce(self, x: Tensor) -> Tensor:
        """Sum over the TP group, in place."""
        if self.tp_group is not None:
            dist.all_reduce(x, group=self.tp_group)
        return x

    def tp_all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] of every TP rank -> [tp, n, ...]."""
        return _all_gather(x, self.tp, self.tp_group)

    def dp_all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] of every replica -> [dp, n, ...]."""
        return _all_gather(x, self.dp, self.dp_group)

    def dp_broadcast(self, x: Tensor, replica: int) -> Tensor:
        """`x` of a replica, in place on the others."""
        if self.dp_group is not None:
            dist.broadcast(x, replica * self.tp + self.tp_rank, group=self.dp_group)
        return x

    def dp_reduce_scatter(self, x: Tensor) -> Tensor:
        """[dp, n, ...] of every replica -> the sum over replicas of row dp_rank, [n, ...]."""
        if self.dp_group is None:
            return x[0]
        out = torch.empty_like(x[0])
        dist.reduce_scatter_tensor(out, x.flatten(0, 1).contiguous(), group=self.dp_group)
        return out

    def exchange(self, data: bytes) -> list[bytes]:
        """The bytes of every rank, in rank order; for the start, not for steps."""
        return [data] if self.world_group is None else gather_bytes(data, self.world_group)


def hosts(dims: ParallelDims) -> list[str]:
    """Of every rank, in rank order. Collective."""
    return [host.decode() for host in dims.exchange(BOOT_ID.read_bytes())]


def gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """The bytes of every rank of a group, in rank order. In tensors: torch unpickles objects, which may run code."""
    sizes = [torch.empty(1, dtype=torch.int64) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(data)]), group=group)
    most = max(1, *(int(size) for size in sizes))
    everybody = [torch.empty(most, dtype=torch.uint8) for _ in sizes]
    dist.all_gather(everybody, torch.frombuffer(bytearray(data.ljust(most)), dtype=torch.uint8), group=group)
    return [one.numpy().tobytes()[: int(size)] for one, size in zip(everybody, sizes, strict=True)]


def reaches_peers(device: torch.device) -> bool:
    """Whether a CUDA device can read and write the memory of all others that this process sees."""
    others = set(range(torch.cuda.device_count())) - {device.index}
    return all(torch.cuda.can_device_access_peer(device, other) for other in others)


def _all_gather(x: Tensor, size: int, group: dist.ProcessGroup | None) -> Tensor:
    if group is None:  # alone, or one rank that a bench runs by itself: its own part stands for the others'
        return x.unsqueeze(0).expand(size, *x.shape)
    out = x.new_empty(size * x.shape[0], *x.shape[1:])
    dist.all_gather_into_tensor(out, x.contiguous(), group=group)
    return out.unflatten(0, (size, -1)) if x.shape[0] else out.view(size, *x.shape)


def init_parallel(
    rank: int,
    tp: int,
    dp: int,
    init_method: str,
    device: torch.device,
    timeout_s: float = 600.0,
    *,
    expert_tp: bool = False,
) -> ParallelDims:
    """Joins this process to the world of tp * dp ranks; collective unless that is 1.

    Args:
        init_method: rendezvous of torch.distributed, such as `tcp://127.0.0.1:29500`.
        device: groups carry CPU tensors over gloo and, where the device is CUDA, CUDA tensors over NCCL.
        timeout_s: of every collective. The first one waits for the slowest rank to load and to compile.
    """
    world = tp * dp
    if not 0 <= rank < world:
        raise ValueError(f"rank={rank} is outside of tp={tp} x dp={dp} = {world} ranks")
    if world == 1:
        return ParallelDims()
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = datetime.timedelta(seconds=timeout_s)
    dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world, timeout=timeout)
    # without `timeout` a group takes torch's own, not the world's
    tp_groups = [dist.new_group(range(d * tp, (d + 1) * tp), timeout=timeout) for d in range(dp)] if tp > 1 else None
    dp_groups = [dist.new_group(range(t, world, tp), timeout=timeout) for t in range(tp)] if dp > 1 else None
    return ParallelDims(
        rank=rank,
        tp=tp,
        dp=dp,
        expert_tp=expert_tp,
        world_group=dist.group.WORLD,
        tp_group=tp_groups[rank // tp] if tp_groups else None,
        dp_group=dp_groups[rank % tp] if dp_groups else None,
    )


def leave_parallel() -> None:
    """Ends what `init_parallel` began. A process that exits without it may abort, because threads of its groups may
    still release tensors while the interpreter ends.
    """
    if dist.is_initialized():
        dist.destroy_process_group()


def check_divides(config_name: str, value: int, size_name: str, size: int) -> int:
    """value // size; a shard must be whole."""
    if value % size:
        raise ValueError(f"{config_name}={value} is not a multiple of {size_name}={size}")
    return value // size
