"""Rows to the ranks that hold their experts, and the experts' results back, by stores and loads in peer memory.

    dispatch   each row once to every rank with one of its experts; the choices of all rows to all ranks; then flags
    experts    of each rank, on the rows of all ranks, into `partial`
    combine    flags; each rank adds up its own rows from the `partial` of the ranks that computed something of them

The row of rank r with index t is row first[r] + t everywhere, so nothing is counted, and the same inputs give the same
bits. One set of buffers serves all layers: a rank sends the next layer's rows after its combine saw that all ranks have
computed this one's, and writes the next `partial` after all ranks have sent again, so have read this one. This needs
all ranks to run both kernels for every layer, on one stream.

Letters: T rows of this rank, G rows of all ranks, D columns, E experts, K experts per row, C = K, + 1 with a shared
expert, which is the last of the rank's experts and computes the rank's own rows.
"""

from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
from torch import Tensor

from millrace_kernels.fp8 import BLOCK, Fp8, Operand
from millrace_kernels.gpu import sms
from millrace_kernels.peer.exchange_kernels import combine_kernel, dispatch_kernel
from millrace_kernels.peer.memory import ALIGN, PeerMemory
from millrace_kernels.peer.signals import FOREVER, POLLS_PER_S
from millrace_kernels.peer.sizes import row_bytes

DISPATCH_PROGRAMS, COMBINE_PROGRAMS = 4, 8  # per multiprocessor at most; then they take several rows
COMBINE_COLUMNS = 1024


class ExpertPlaces(NamedTuple):
    """Where a layer's experts are. Global place = rank * slots + slot; rank = member of the group * tp + tp_rank."""

    table: Tensor  # int32 [X, E + 1] on the device: row r of G finds expert e at the place [r % X, e]; -1 for padding
    slots: int  # routed experts of a rank; the shared one comes behind them
    tp: int = 1
    tp_rank: int = 0  # of all ranks of the group; experts of ranks with another one are computed in other groups


class Received(NamedTuple):
    """The rows of all ranks, valid until the next dispatch. A row without an expert here has arbitrary content."""

    rows: Operand  # [G, D]
    weights: Tensor  # float32 [G, C]
    slots: Tensor  # int32 [G, C], -1 for experts of other ranks
    partial: Tensor  # [G, D] for this rank's sums


class Exchange:
    """The buffers for all layers of a model.

    Attributes:
        most_rows: T of the largest dispatch.
        nbytes: of the device, for all layers; torch does not count them.
        error: int32 [1] on the device, 0 or 1 + the member of the group that did not answer.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, most_rows: int, dim: int, choices: int, dtype: torch.dtype
    ) -> None:
        """Collective. choices: K + 1; dtype: of plain rows and of results."""
        self.most_rows, self.dim, self.dtype, self._choices = most_rows, dim, dtype, choices
        rows = dist.get_world_size(group) * most_rows
        sizes = (rows * dim * dtype.itemsize, rows * -(-dim // BLOCK) * 4, rows * choices * 4, rows * choices * 4)
        self.nbytes = rows * row_bytes(dim, choices, dtype) + 8 * ALIGN
        self._memory = memory = PeerMemory(group, self.nbytes, device)
        self._rows_at, self._rows = memory.take((sizes[0],), torch.uint8)
        self._scales_at, self._scales = memory.take((sizes[1] // 4,), torch.float32)
        self._slots_at, self._slots = memory.take((sizes[2] // 4,), torch.int32)
        self._weights_at, self._weights = memory.take((sizes[3] // 4,), torch.float32)
        self._partial_at, self._partial = memory.take((rows, dim), dtype)
        self._arrived_at, _ = memory.take((memory.size,), torch.int32)
        self._ready_at, _ = memory.take((memory.size,), torch.int32)
        # epoch, programs of a dispatch that are done, polls of a wait
        self._state = torch.tensor([0, 0, FOREVER], dtype=torch.int32, device=device)
        self.error = memory.error

    def answer_within(self, seconds: float) -> None:
        """From now on a rank that does not answer for about so long is an error."""
        self._state[2] = int(seconds * POLLS_PER_S)

    def close(self) -> None:
        """As that of `PeerMemory`."""
        self._memory.close()

    def dispatch(
        self,
        x: Tensor,
        weights: Tensor,
        ids: Tensor,
        places: ExpertPlaces,
        counts: list[int],
        *,
        shared: bool,
        quant: bool,
    ) -> Received:
        """Sends this rank's rows, and returns those of all ranks; collective.

        Args:
            x: [T, D] in `dtype`; weights: float32 [T, K]; ids: int32 [T, K], -1 in all of a row for padding.
            counts: T of every rank, at most `most_rows`. In a CUDA graph they are those of every replay.
            shared: whether the rows choose this rank's shared expert too, with weight 1.
            quant: whether rows travel in FP8, as `quant_groups` makes it; D is then a multiple of 128.
        """
        num_rows, total = len(x), sum(counts)
        assert counts[self._memory.rank] == num_rows and max(counts) <= self.most_rows, (counts, x.shape)
        assert x.dtype == self.dtype and x.shape[1] == self.dim and x.stride(1) == 1, (x.dtype, x.shape)
        assert not quant or (self.dim % BLOCK == 0 and x.dtype == torch.bfloat16), (self.dim, x.dtype)
        assert weights.is_contiguous() and ids.is_contiguous() and ids.dtype == torch.int32, ids.dtype
        grid = (max(1, min(num_rows, DISPATCH_PROGRAMS * sms())),)
        dispatch_kernel[grid](
            x, weights, ids, *self._arguments(places), num_rows, self._first(counts), x.stride(0),
            self._rows_at, self._scales_at, self._slots_at, self._weights_at, self._arrived_at,
            **self._constants(places, ids, shared), GROUPS=triton.next_power_of_2(-(-self.dim // BLOCK)),
            QUANT=quant, num_warps=8,
        )  # fmt: skip
        return self._received(total, ids.shape[1] + shared, quant)

    def combine(self, ids: Tensor, places: ExpertPlaces, counts: list[int], *, shared: bool) -> Tensor:
        """-> [T, D], the sums over the ranks' partial rows in FP32 and in rank order; 0 for padding; collective.

        The ranks' experts have filled `partial` on this stream. Arguments as for the dispatch before it.
        """
        num_rows = counts[self._memory.rank]
        out = torch.empty(num_rows, self.dim, dtype=self.dtype, device=ids.device)
        columns = min(COMBINE_COLUMNS, triton.next_power_of_2(self.dim))
        tiles = triton.cdiv(self.dim, columns)
        grid = (max(1, min(num_rows, COMBINE_PROGRAMS * sms() // tiles)), tiles)
        combine_kernel[grid](
            out, ids, *self._arguments(places), num_rows, self._first(counts), self._partial_at, self._ready_at,
            **self._constants(places, ids, shared), BLOCK_D=columns, num_warps=4,
        )  # fmt: skip
        return out

    def _first(self, counts: list[int]) -> int:
        return sum(counts[: self._memory.rank])

    def _arguments(self, places: ExpertPlaces) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return places.table, self._memory.bases, self._state, self.error

    def _constants(self, places: ExpertPlaces, ids: Tensor, shared: bool) -> dict[str, int]:
        copies, columns = places.table.shape
        choices = ids.shape[1] + shared
        assert choices <= self._choices and places.table.is_contiguous(), (choices, places.table.stride())
        return {
            "RANK": self._memory.rank, "SIZE": self._memory.size,
            "COPIES": copies, "E": columns - 1, "SLOTS": places.slots, "TP": places.tp, "TP_RANK": places.tp_rank,
            "K": ids.shape[1], "C": choices, "C_PAD": triton.next_power_of_2(choices), "D": self.dim,
        }  # fmt: skip

    def _received(self, total: int, choices: int, quant: bool) -> Received:
        dtype = torch.float8_e4m3fn if quant else self.dtype
        data = self._rows[: total * self.dim * dtype.itemsize].view(dtype).view(total, self.dim)
        rows = Operand(data, None)
        if quant:
            rows = Operand(None, Fp8(data, self._scales[: total * (self.dim // BLOCK)].view(total, self.dim // BLOCK)))
        weights, slots = (held[: total * choices].view(total, choices) for held in (self._weights, self._slots))
        return Received(rows, weights, slots, self._partial[:total])
