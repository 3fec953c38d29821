"""Which drafts of a step's decode sequences hold, and the state of their slots behind the step.

A sequence had q rows: its newest token and q - 1 drafts; row i sampled tokens[i]. Draft i holds if it and all before it
are what the rows before theirs sampled:

    count    1 + drafts that hold, at most the positions from `lengths` on that have a page: tokens that the step adds
    drafted  drafts before the first missing one, at most those with a page
    row      the row that sampled the newest token

lengths[slot] grows by count; last_tokens[slot] becomes the newest token, and no drafts. Letters: N slots, K tokens of
each, B sequences.
"""

import torch
from torch import Tensor

from millrace_kernels.backend import implementation
from millrace_kernels.decode_rows import SlotState
from millrace_kernels.sample_tokens import mix32

NONE = -1  # the place of a draft without one


def accept_drafts(
    slots: Tensor, tokens: Tensor, state: SlotState, out: Tensor, simulated: Tensor | None = None
) -> None:
    """
    Args:
        slots: int64 [B]; tokens: int64 [B * q], q <= K. Sequences may share a slot where its capacity is its length.
        state: lengths and last_tokens are changed.
        out: int64 [3, B], for counts, drafted, and rows from 0 to B * q - 1.
        simulated: float32 [>= q - 1], instead of comparing: the probability that the first draft, the first two, … hold
    """
    count = slots.shape[0]
    if not count:
        return
    if run := implementation("accept_drafts.accept_drafts", slots.device, count):
        run(slots, tokens, state, out, simulated)
        return
    (lengths, capacity, last_tokens), num_queries = state, tokens.shape[0] // count
    sampled, start = tokens.view(count, num_queries), lengths[slots]
    drafts, room = last_tokens[slots, 1:num_queries], capacity[slots] - start
    if simulated is None:
        held = sampled[:, :-1] == drafts
    else:  # one draw decides how many drafts hold
        held = (mix32(start + slots).double() / 2**32)[:, None] < simulated[: num_queries - 1]
    out[0] = torch.minimum(_leading(held) + 1, room)
    out[1] = torch.minimum(_leading(drafts >= 0), (room - 1).clamp_(min=0))
    out[2] = torch.arange(count, device=slots.device) * num_queries + (out[0] - 1).clamp_(min=0)
    lengths[slots] = start + out[0]
    newest = last_tokens.new_full((count, last_tokens.shape[1]), NONE)
    newest[:, 0] = tokens[out[2]]
    last_tokens[slots] = newest


def _leading(held: Tensor) -> Tensor:
    """bool [B, k] -> int64 [B]: how many are true before the first that is not"""
    return held.long().cumprod(1).sum(1)
