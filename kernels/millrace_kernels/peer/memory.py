"""Memory of the same size on every rank of a group, all of it mapped by every rank.

On CUDA it is torch's symmetric memory: NVLink carries the loads and stores. On a CPU it is one file in /dev/shm, so
that processes with Triton's interpreter run the same kernels.
"""

import math
import os
import secrets
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

ALIGN = 128  # bytes; a line of L2, so that the parts of a block never share one


class PeerMemory:
    """A block per rank. Addresses differ between processes, offsets in a block do not.

    Attributes:
        rank, size: this process in the group, and the number of its ranks.
        bases: int64 [size] on the device, the address of every rank's block, in rank order.
        error: int32 [1] on the device, in this rank's own memory: 0, or 1 + the rank that did not answer.
    """

    def __init__(self, group: dist.ProcessGroup, nbytes: int, device: torch.device) -> None:
        """Collective: every rank of `group` makes its blocks in the same order, with equal `nbytes`.

        The environment of a process with CUDA must have TORCH_SYMM_MEM_DISABLE_MULTICAST=1.
        Raises RuntimeError without it, and if the ranks' devices cannot map each other's memory.
        """
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        nbytes = -(-nbytes // ALIGN) * ALIGN
        make = _symmetric if device.type == "cuda" else _file
        self._block, addresses, self._keep = make(group, nbytes, device)
        self._used = 0
        self.bases = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.error = torch.zeros(1, dtype=torch.int32, device=device)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[int, Tensor]:
        """-> the offset of a part in every rank's block, in bytes, and this rank's part: zeros, at a multiple of 128.

        Every rank takes the same parts in the same order. Raises MemoryError if the block is full.
        """
        first, nbytes = self._used, math.prod(shape) * dtype.itemsize
        if first + nbytes > len(self._block):
            raise MemoryError(f"{shape} of {dtype} needs {nbytes} bytes, {len(self._block) - first} are left")
        self._used = first + -(-nbytes // ALIGN) * ALIGN
        return first, self._block[first : first + nbytes].view(dtype).view(shape)

    def close(self) -> None:
        """Lets go of the block, when no kernel of any rank uses it any more. Parts that were taken become invalid."""
        self._block, self._keep = self._block.new_empty(0), None


def _symmetric(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> tuple[Tensor, list[int], object]:
    """This rank's block, filled with zeros, every rank's address, and what must live as long as the block."""
    import torch.distributed._symmetric_memory as symmetric  # loads slowly, and a CPU needs none
    from torch._C._autograd import DeviceType

    if symmetric._SymmetricMemory.has_multicast_support(DeviceType.CUDA, torch.cuda.current_device()):
        raise RuntimeError("set TORCH_SYMM_MEM_DISABLE_MULTICAST=1: the rendezvous would make multicast objects")
    block = symmetric.empty(nbytes, dtype=torch.uint8, device=device)
    block.zero_()
    torch.cuda.synchronize(device)  # before a peer writes; the rendezvous waits for all ranks
    handle = symmetric.rendezvous(block, group)
    addresses = list(handle.buffer_ptrs)
    assert addresses[dist.get_rank(group)] == block.data_ptr(), "the block does not begin its allocation"
    return block, addresses, handle


def _file(group: dist.ProcessGroup, nbytes: int, device: torch.device) -> tuple[Tensor, list[int], None]:
    """The blocks of all ranks in one file, which has no name any more once every rank has mapped it."""
    rank, size, number = dist.get_rank(group), dist.get_world_size(group), torch.tensor([secrets.randbits(63)])
    dist.broadcast(number, src=dist.get_global_rank(group, 0), group=group)
    path = Path(f"/dev/shm/millrace-peer-{int(number):x}")
    if rank == 0:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.truncate(descriptor, nbytes * size)
        os.close(descriptor)
    dist.barrier(group)
    blocks = torch.from_file(str(path), shared=True, size=nbytes * size, dtype=torch.uint8)
    dist.barrier(group)
    if rank == 0:
        path.unlink()
    first = blocks.data_ptr()
    return blocks[rank * nbytes : (rank + 1) * nbytes], [first + peer * nbytes for peer in range(size)], None
