"""Flash attention over ragged sequences: a program takes BLOCK_M queries of one head and walks over their keys. Also
what runs where FlashInfer is missing. The columns of q and k are loaded in two parts, since 192 is no power of two.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.backend import KernelPlan
from millrace_kernels.gpu import fitting
from millrace_kernels.triton.host_table import host_table
from millrace_kernels.triton.softmax import LOG2E, begin, finish, fold

QK_DIM, V_DIM = 192, 128  # of a head of V3


class MlaPrefillConfig(NamedTuple):
    block_m: int  # queries of a program
    block_n: int  # keys at a time; what shared memory holds bounds it
    num_warps: int
    num_stages: int


def config(longest: int, dtype: torch.dtype) -> MlaPrefillConfig:
    """The configuration for sequences of up to `longest` queries in dtype."""
    wide = dtype == torch.float32
    block_m = max(16, min(32 if wide else 128, triton.next_power_of_2(longest)))
    if wide:
        return MlaPrefillConfig(block_m, 32, 4, 1)
    stages = fitting(2, 64 * 2 * (QK_DIM + V_DIM), block_m * 2 * QK_DIM)
    return MlaPrefillConfig(block_m, 64, 8 if block_m == 128 else 4, stages)


def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    scale: float,
    causal: bool,
    plan: KernelPlan = None,
    chosen: MlaPrefillConfig | None = None,
) -> tuple[Tensor, Tensor]:
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1, (q.stride(), k.stride(), v.stride())
    out, lse = outputs(q, v, sum(q_lens))
    longest = max(q_lens, default=0)
    chosen = chosen or config(longest, q.dtype)
    if longest:
        starts = [tuple(accumulate(lens, initial=0))[:-1] for lens in (q_lens, k_lens)]
        table = host_table((starts[0], tuple(q_lens), starts[1], tuple(k_lens)), q.device)
        first = 1 << (q.shape[2].bit_length() - 1)
        _attend[(triton.cdiv(longest, chosen.block_m), q.shape[1], len(q_lens))](
            out, lse, q, k, v, table,
            len(q_lens), scale, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2],
            CAUSAL=causal, D1=first, D2=q.shape[2] - first, V=v.shape[2],
            BLOCK_M=chosen.block_m, BLOCK_N=chosen.block_n, num_warps=chosen.num_warps, num_stages=chosen.num_stages,
        )  # fmt: skip
    return out, lse


def outputs(q: Tensor, v: Tensor, used: int) -> tuple[Tensor, Tensor]:
    """out [Tq, H, Dv] and lse [Tq, H] to be filled up to row `used`; those past it are done."""
    out = q.new_empty(*q.shape[:2], v.shape[2])
    lse = q.new_empty(q.shape[:2], dtype=torch.float32)
    if used < len(q):
        out[used:], lse[used:] = 0.0, -torch.inf
    return out, lse


@triton.jit(do_not_specialize=["num_seqs"])
def _attend(
    out_ptr, lse_ptr, q_ptr, k_ptr, v_ptr, table_ptr,
    num_seqs, scale, q_row, q_head, k_row, k_head, v_row, v_head,
    CAUSAL: tl.constexpr, D1: tl.constexpr, D2: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    head, seq = tl.program_id(1), tl.program_id(2)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_M  # the longest of causal work begins first
    q_len = tl.load(table_ptr + num_seqs + seq)
    if first < q_len:
        q_start = tl.load(table_ptr + seq).to(tl.int64)
        k_start = tl.load(table_ptr + 2 * num_seqs + seq).to(tl.int64)
        k_len = tl.load(table_ptr + 3 * num_seqs + seq)
        query = first + tl.arange(0, BLOCK_M)
        q_rows, q_mask = q_ptr + (q_start + query[:, None]) * q_row + head * q_head, (query < q_len)[:, None]
        q = tl.load(q_rows + tl.arange(0, D1)[None, :], mask=q_mask, other=0.0)
        q_rest = q
        if D2 > 0:
            q_rest = tl.load(q_rows + D1 + tl.arange(0, D2)[None, :], mask=q_mask, other=0.0)
        k_rows = k_ptr + k_start * k_row + head * k_head
        v_rows = v_ptr + k_start * v_row + head * v_head
        column = tl.arange(0, V)[None, :]
        largest, total = begin(BLOCK_M)
        out = tl.zeros((BLOCK_M, V), dtype=tl.float32)
        end = tl.minimum(k_len, first + BLOCK_M) if CAUSAL else k_len
        for start in range(0, end, BLOCK_N):
            key = start + tl.arange(0, BLOCK_N)
            inside, row = (key < k_len)[:, None], key[:, None].to(tl.int64)  # past k_len there may be NaN
            scores = _scores(q, q_rest, k_rows + row * k_row, inside, D1, D2)
            visible = key[None, :] < k_len
            if CAUSAL:
                visible = visible & (key[None, :] <= query[:, None])
            scores = tl.where(visible, scores * (scale * LOG2E), float("-inf"))
            weights, fade, largest, total = fold(scores, largest, total)
            v = tl.load(v_rows + row * v_row + column, mask=inside, other=0.0)
            out = out * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")

        out, lse = finish(out, largest, total)
        where = (q_start + query) * tl.num_programs(1) + head
        tl.store(lse_ptr + where, lse, mask=query < q_len)
        out = out.to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + where[:, None] * V + column, out, mask=q_mask)


@triton.jit
def _scores(q, q_rest, k_rows, k_mask, D1: tl.constexpr, D2: tl.constexpr):
    """[q | q_rest] k^T"""
    k = tl.load(k_rows + tl.arange(0, D1)[None, :], mask=k_mask, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if D2 > 0:
        k_rest = tl.load(k_rows + D1 + tl.arange(0, D2)[None, :], mask=k_mask, other=0.0)
        scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
    return scores
