"""The end of an attention or MLP of a tensor-parallel rank: its part of a sum becomes the next layer's input."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeAlias

import torch
from millrace_kernels.fp8 import Operand
from torch import Tensor

from millrace_serve.model.layers import RmsNorm
from millrace_serve.model.parallel import BOOT_ID, ParallelDims, gather_bytes, reaches_peers

if TYPE_CHECKING:
    from millrace_kernels.peer.reduce_norm import ReduceNorm  # needs Triton

Fused: TypeAlias = "ReduceNorm"
log = logging.getLogger(__name__)


class TpReduce:
    """Sum over the TP group, residual, RMS norm and FP8 form: one kernel where `fused` serves the rows."""

    def __init__(self, dims: ParallelDims, fused: Fused | None = None) -> None:
        self.dims, self.fused = dims, fused

    def __call__(
        self, norm: RmsNorm, part: Tensor, residual: Tensor | None, *, whole: bool = False
    ) -> tuple[Operand, Tensor]:
        """part [T, D] of this rank, which may be overwritten, and residual [T, D] -> norm.operand of the sum.

        whole: the new residual has all rows; otherwise perhaps only those that the next call reads on this rank.
        """
        if self.fused is not None and self.fused.serves(part):
            return self.fused(part, residual, norm.weight, norm.eps, quant=norm.quant, plain=norm.plain, whole=whole)
        return norm.operand(self.dims.tp_all_reduce(part), residual)


def fused_reduce(
    dims: ParallelDims, num_rows: int, hidden: int, device: torch.device, dtype: torch.dtype
) -> Fused | None:
    """Collective over the TP group. None where its ranks share no memory: on several hosts, on CPUs, or alone.

    num_rows: of the longest step.
    """
    group = dims.tp_group
    if group is None or device.type != "cuda" or dtype != torch.bfloat16:
        return None
    places = gather_bytes(BOOT_ID.read_bytes() if reaches_peers(device) else b"", group)
    if set(places) != {places[0]} or not places[0]:
        log.info("sums over tp=%d run in NCCL: not all devices reach each other's memory", dims.tp)
        return None
    from millrace_kernels.peer.reduce_norm import ReduceNorm, ways_for  # needs Triton

    fused = ReduceNorm(group, hidden, device, ways_for(len(places), num_rows))
    log.info("sums over tp=%d run over peer memory: rows one_shot=%d two_shot=%d", dims.tp, *fused.ways)
    return fused
