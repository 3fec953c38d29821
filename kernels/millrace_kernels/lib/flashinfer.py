"""FlashInfer's ragged prefill (FlashAttention 3, sm90): heads of 192 for q and k and of 128 for v, BF16, any
strides but the last. Its lse is in base 2.

A sequence that has queries but no keys spoils those after it, so such sequences are left out: the queries of the others
are gathered, and the sequence's own get out 0 and lse -inf. When every sequence has keys, as in causal attention,
nothing is copied.

A plan is made on the host in a pinned buffer and copied asynchronously. So a wrapper, which owns the buffer, serves one
plan at a time and is planned again only when that copy is over: the GPU may be a step behind.

Its radix select prefers the first of equal logits, and then one block selects a whole row, with its state in shared
memory. So it waits for no other block, and a CUDA graph may contain it.
"""

import functools
import logging
import math
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from millrace_kernels.mla_prefill import Heads
from millrace_kernels.triton import mla_prefill as ours

QK_DIM, V_DIM, QUERIES_PER_TILE = 192, 128, 128
MOST_CHOSEN, LEAST_ROWS = 2048, 1 << 15  # FILTERED_TOPK_MAX_K in its topk.cuh; rows of its zeros
LEAST_WORKSPACE = 1 << 20
LN_2 = math.log(2.0)

log = logging.getLogger(__name__)


class FlashInferPlan:
    """Made at its first use, when the scale is known; its wrapper goes back when the plan is no longer referenced."""

    def __init__(
        self, q_lens: Sequence[int], k_lens: Sequence[int], num_heads: int, causal: bool, device: torch.device
    ) -> None:
        """`rows`: int64, those of the queries that have keys; None: all of them."""
        seeing = [(q_len, k_len) for q_len, k_len in zip(q_lens, k_lens, strict=True) if k_len]
        self.q_lens, self.k_lens = tuple(q for q, _ in seeing), tuple(k for _, k in seeing)
        self.rows: Tensor | None = None
        if sum(self.q_lens) != sum(q_lens):
            rows = (torch.tensor(k_lens) > 0).repeat_interleave(torch.tensor(q_lens)).nonzero()[:, 0]
            self.rows = rows.pin_memory().to(device, non_blocking=True)
        self.num_heads, self.causal, self.device = num_heads, causal, device
        self._slot: _Slot | None = None
        self._scale = math.nan

    def run(self, q: Tensor, k: Tensor, v: Tensor, scale: float, out: Tensor, lse: Tensor) -> None:
        """Tensors without rows past the sum of the lengths."""
        if self._slot is None:
            free = _free_slots[self.device]
            self._slot = _take(free, self.device, self._work_bytes())
            weakref.finalize(self, free.append, self._slot)
        if self._scale != scale:
            self._slot.plan(self, scale)
            self._scale = scale
        self._slot.wrapper.run(q, k, v, out=out, lse=lse, return_lse=True)

    def _work_bytes(self) -> int:
        """Bytes of the list of tiles, seven integers each, and of the list of multiprocessors."""
        tiles = sum(-(-n // QUERIES_PER_TILE) for n in self.q_lens)
        return 7 * 4 * tiles * self.num_heads + 4096


class _Slot:
    def __init__(self, device: torch.device, size: int) -> None:
        from flashinfer import BatchPrefillWithRaggedKVCacheWrapper

        self.size = size
        unused = torch.empty(LEAST_WORKSPACE, dtype=torch.uint8, device=device)  # FlashAttention 3 does not split keys
        self.wrapper = BatchPrefillWithRaggedKVCacheWrapper(unused, "NHD", backend="fa3")
        self.wrapper.reset_workspace_buffer(unused, torch.empty(size, dtype=torch.uint8, device=device))
        self.copied = torch.cuda.Event()

    def plan(self, plan: FlashInferPlan, scale: float) -> None:
        self.copied.synchronize()
        self.wrapper.plan(
            _starts(plan.q_lens),
            _starts(plan.k_lens),
            plan.num_heads,
            plan.num_heads,
            QK_DIM,
            V_DIM,
            causal=plan.causal,
            sm_scale=scale,
            q_data_type=torch.bfloat16,
            kv_data_type=torch.bfloat16,
        )
        self.copied.record()


_free_slots: defaultdict[torch.device, list[_Slot]] = defaultdict(list)


def schedule(
    q_lens: Sequence[int], k_lens: Sequence[int], heads: Heads, causal: bool, device: torch.device, dtype: torch.dtype
) -> FlashInferPlan | None:
    taken = (heads.qk_dim, heads.v_dim, dtype) == (QK_DIM, V_DIM, torch.bfloat16)
    seeing = any(q_len and k_len for q_len, k_len in zip(q_lens, k_lens, strict=True))
    if not taken or not seeing or not _works(device):
        return None
    return FlashInferPlan(q_lens, k_lens, heads.num_heads, causal, device)


def mla_prefill(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_lens: Sequence[int],
    k_lens: Sequence[int],
    scale: float,
    causal: bool,
    plan: FlashInferPlan | None = None,
) -> tuple[Tensor, Tensor]:
    plan = plan or schedule(q_lens, k_lens, Heads(q.shape[1], q.shape[2], v.shape[2]), causal, q.device, q.dtype)
    if plan is None:
        return ours.mla_prefill(q, k, v, q_lens, k_lens, scale, causal)
    queries, keys = sum(q_lens), sum(k_lens)
    if plan.rows is None:
        out, lse = ours.outputs(q, v, queries)
        plan.run(q[:queries], k[:keys], v[:keys], scale, out[:queries], lse[:queries])
        lse[:queries].mul_(LN_2)
        return out, lse
    gathered = q.index_select(0, plan.rows)
    part, part_lse = ours.outputs(gathered, v, len(gathered))
    plan.run(gathered, k[:keys], v[:keys], scale, part, part_lse)
    out, lse = ours.outputs(q, v, 0)
    return out.index_copy_(0, plan.rows, part), lse.index_copy_(0, plan.rows, part_lse.mul_(LN_2))


def top_keys(logits: Tensor, lens: Tensor, topk: int) -> Tensor:
    """int32, a row's keys in their order. Of equal logits it takes the first keys, so that ranks agree."""
    topk = min(topk, logits.shape[1])
    if topk > MOST_CHOSEN or not len(lens) or not _works(logits.device, _of_one_row):
        return logits.topk(topk, sorted=False).indices
    return _radix_select(logits.contiguous(), lens, topk)  # DeepGEMM's rows may lie apart


def _radix_select(logits: Tensor, lens: Tensor, topk: int) -> Tensor:
    """It reads no logits behind `lens`."""
    from flashinfer import TopKTieBreak, top_k_ragged_transform

    num = max(LEAST_ROWS, 1 << len(lens).bit_length())  # the same for all graphs: none may own what others read
    offsets = _zeros(num, lens.device)[: len(lens)]  # to add to a row's keys
    return top_k_ragged_transform(logits, offsets, lens, topk, tie_break=TopKTieBreak.SMALL)


@functools.cache
def _zeros(num: int, device: torch.device) -> Tensor:
    return torch.zeros(num, dtype=torch.int32, device=device)


def _of_one_row(device: torch.device) -> None:
    _radix_select(torch.zeros(1, 4, device=device), _zeros(1, device), 1)


def _of_one_query(device: torch.device) -> None:
    q, v = (torch.zeros(1, 1, dim, dtype=torch.bfloat16, device=device) for dim in (QK_DIM, V_DIM))
    FlashInferPlan((1,), (1,), 1, True, device).run(q, q, v, 1.0, *ours.outputs(q, v, 1))


@functools.cache
def _works(device: torch.device, call: Callable[[torch.device], None] = _of_one_query) -> bool:
    """Whether the kernels of a call compile; the first use needs a compiler and a minute, or a cache."""
    try:
        call(device)
    except Exception as error:  # a compiler may fail in any way
        log.warning("flashinfer cannot be used, the next best runs: %s: %s", type(error).__name__, error)
        return False
    return True


def _take(free: list[_Slot], device: torch.device, size: int) -> _Slot:
    for index, slot in enumerate(free):
        if slot.size >= size and slot.copied.query():
            return free.pop(index)
    return _Slot(device, max(LEAST_WORKSPACE, 1 << size.bit_length()))


def _starts(lens: Sequence[int]) -> Tensor:
    """int32 [B+1] in memory from which it travels without a synchronisation"""
    return torch.tensor(tuple(accumulate(lens, initial=0)), dtype=torch.int32).pin_memory()
