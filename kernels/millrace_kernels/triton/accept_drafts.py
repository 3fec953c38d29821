"""One launch, without waiting of sequences for each other."""

import triton
import triton.language as tl
from torch import Tensor

from millrace_kernels.accept_drafts import NONE
from millrace_kernels.decode_rows import SlotState
from millrace_kernels.triton.sample_tokens import mix32

BLOCK = 32  # sequences of a program


def accept_drafts(slots: Tensor, tokens: Tensor, state: SlotState, out: Tensor, simulated: Tensor | None) -> None:
    lengths, capacity, last_tokens = state
    assert slots.is_contiguous() and tokens.is_contiguous() and last_tokens.stride(1) == out.stride(1) == 1
    count, known = slots.shape[0], last_tokens.shape[1]
    q = tokens.shape[0] // count
    _accept_drafts[(triton.cdiv(count, BLOCK),)](
        out, lengths, last_tokens, slots, tokens, capacity, simulated, count, out.stride(0), last_tokens.stride(0),
        Q=q, Q_PAD=triton.next_power_of_2(q), KNOWN=known, K_PAD=triton.next_power_of_2(known),
        NO_DRAFT=NONE, BLOCK=BLOCK, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["count"])
def _accept_drafts(
    out, lengths, last_tokens, slots, sampled, capacity, simulated, count, out_row, tokens_row,
    Q: tl.constexpr, Q_PAD: tl.constexpr, KNOWN: tl.constexpr, K_PAD: tl.constexpr, NO_DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = seq < count
    slot = tl.load(slots + seq, real, other=0)
    length = tl.load(lengths + slot, real, other=0)
    room = tl.load(capacity + slot, real, other=0) - length
    draft = tl.arange(0, Q_PAD)[None, :]
    exists = real[:, None] & (draft < Q - 1)
    drafts = tl.load(last_tokens + slot[:, None] * tokens_row + 1 + draft, exists, other=NO_DRAFT)
    if simulated is None:
        held = exists & (drafts == tl.load(sampled + seq[:, None] * Q + draft, exists, other=0))
    else:
        drawn = mix32((length + slot).to(tl.uint32)).to(tl.float64) * 2.3283064365386963e-10
        held = exists & (drawn[:, None] < tl.load(simulated + draft, draft < Q - 1, other=0.0).to(tl.float64))
    leading = tl.min(tl.where(held, Q_PAD, draft), axis=1)  # there is none in the place Q - 1
    known = tl.min(tl.where(drafts >= 0, Q_PAD, draft), axis=1)
    counts = tl.minimum(leading + 1, room)
    row = seq * Q + tl.maximum(counts - 1, 0)
    tl.store(out + seq, counts, real)
    tl.store(out + out_row + seq, tl.minimum(known, tl.maximum(room - 1, 0)), real)
    tl.store(out + 2 * out_row + seq, row, real)
    newest = tl.load(sampled + row, real, other=0)
    tl.store(lengths + slot, length + counts, real)
    place = tl.arange(0, K_PAD)[None, :]
    left = tl.where(place == 0, newest[:, None], NO_DRAFT)
    tl.store(last_tokens + slot[:, None] * tokens_row + place, left, real[:, None] & (place < KNOWN))
