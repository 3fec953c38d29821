"""The end of an attention or MLP of a tensor-parallel rank in one kernel: sum, residual, RMS norm, FP8 form.

    one_shot   every rank gets all parts and finishes all rows: one way over NVLink
    two_shot   rows have owners, which finish them and send results: two ways, with fewer bytes where ranks are many

More rows than WAYS names are for torch.distributed. The sum is FP32 in rank order and is rounded once, with the
residual, so all ranks get the same bits.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import BLOCK, Fp8, Operand
from millrace_kernels.gpu import sms
from millrace_kernels.peer.memory import ALIGN, PeerMemory
from millrace_kernels.peer.signals import FOREVER, POLLS_PER_S
from millrace_kernels.triton import reduce_norm as kernels
from millrace_kernels.triton.quant import empty_fp8

WARPS = 16


class Ways(NamedTuple):
    one_shot: int  # most rows
    two_shot: int


# By ranks. Two were measured; the others are estimates from bytes and latencies.
WAYS = {2: Ways(256, 4096), 4: Ways(24, 512), 8: Ways(8, 512)}


def ways_for(size: int, num_rows: int) -> Ways:
    """The ways of a group of `size` ranks whose calls have at most so many rows: shorter calls need less memory."""
    one_shot, two_shot = WAYS[min((known for known in WAYS if known >= size), default=max(WAYS))]
    return Ways(min(one_shot, num_rows), min(two_shot, num_rows))


class ReduceNorm:
    """The slots of one group of ranks for rows of one width. Calls are collective, all on one stream of a rank."""

    def __init__(self, group: dist.ProcessGroup, width: int, device: torch.device, ways: Ways) -> None:
        """Collective."""
        self.ways, size = ways, dist.get_world_size(group)
        self.width, self.groups = width, max(1, triton.next_power_of_2(width) // BLOCK)
        one, two = self.ways.one_shot, -(-self.ways.two_shot // size) * size
        rows = (2, two, width)
        slots: list[tuple[tuple[int, ...], torch.dtype]] = [((2, size, one, width), torch.int16)]
        if self.ways.two_shot > self.ways.one_shot:
            slots += [((2, size, two // size, width), torch.int16), (rows, torch.int16), (rows, torch.int16)]
            slots += [(rows, torch.int8), ((2, two, self.groups), torch.int32)]
        self.nbytes = sum(math.prod(shape) * dtype.itemsize + ALIGN for shape, dtype in slots)
        self.memory = PeerMemory(group, self.nbytes, device)
        self.error = self.memory.error
        self._slots = [self.memory.take(*slot)[0] for slot in slots]
        self._phases = torch.zeros(2, max(self.ways), dtype=torch.int32, device=device)
        self._nothing = torch.zeros(1, width, dtype=torch.bfloat16, device=device)
        self._polls = torch.full((1,), FOREVER, dtype=torch.int32, device=device)

    def answer_within(self, seconds: float) -> None:
        """From now on a rank that does not answer for about so long is an error."""
        self._polls.fill_(int(seconds * POLLS_PER_S))

    def serves(self, x: Tensor) -> bool:
        return x.shape[0] <= max(self.ways) and x.dtype == torch.bfloat16

    def __call__(
        self, x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, *, quant: bool, plain: bool,
        whole: bool = False,
    ) -> tuple[Operand, Tensor]:  # fmt: skip
        """Collective. x [T, D], this rank's part, and residual [T, D] -> as rms_norm of the sum over ranks.

        Args:
            quant, plain: as of rms_norm.
            whole: the second result has all rows; otherwise perhaps only those that this rank's next call reads.
        """
        residual = self._nothing.expand(x.shape) if residual is None else residual
        assert x.shape == residual.shape and x.stride(1) == residual.stride(1) == 1 and self.serves(x), x.shape
        num_rows = x.shape[0]
        quant = quant and num_rows > SMALL_TOKENS
        plain = plain or not quant
        total = x.new_empty(num_rows, self.width)
        out = torch.empty_like(total) if plain else None
        fp8 = empty_fp8(num_rows, self.width, x.device) if quant else None
        if num_rows:
            self._launch(x, residual, weight, eps, out, total, fp8, whole)
        return Operand(out, fp8), total

    def _launch(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Tensor | None, total: Tensor,
        fp8: Fp8 | None, whole: bool,
    ) -> None:  # fmt: skip
        memory, num_rows = self.memory, x.shape[0]
        shards = num_rows > self.ways.one_shot
        data, scales = fp8 or (x, x)  # not written, as `x` in the place of `out`
        tensors = x, residual, weight, x if out is None else out, total, data, scales
        state = memory.bases, self._phases[int(shards)], self._polls, self.error
        numbers = memory.rank, num_rows, self._rows(shards), self.width, eps
        strides = x.stride(0), residual.stride(0), scales.stride(1)
        options = {"SIZE": memory.size, "GROUPS": self.groups, "PLAIN": out is not None, "QUANT": fp8 is not None}
        grid = (min(num_rows, sms()),)
        if shards:
            at = self._slots[1:]
            run = kernels.two_shot[grid]
            run(*tensors, *state, *at, *numbers, *strides, **options, WHOLE=whole, num_warps=WARPS)
        else:
            run = kernels.one_shot[grid]
            run(*tensors, *state, self._slots[0], *numbers, *strides, **options, num_warps=WARPS)

    def _rows(self, shards: bool) -> int:
        """Rows that there are slots for."""
        size = self.memory.size
        return -(-self.ways.two_shot // size) * size if shards else self.ways.one_shot
