"""Drafts by the MTP layer (V3 paper, section 2.2), made behind each step for the next one.

1. The MTP layer runs over all rows of the step: row i takes the hidden state of row i and the token behind it, which
   the step has just sampled or which the host knows from the prompt. That writes the layer's KV, also in a step that
   makes no drafts: a sequence without it would be drafted badly ever after. Rows behind the accepted ones write KV that
   the next step overwrites before any row attends to it.
2. The output of the last accepted row gives the first draft; that draft and this output give the second, and so on.

The target samples every row as it would without drafts, and what differs from them is not accepted
(millrace_kernels/accept_drafts.py). So a wrong or a missing draft costs a row, never a token.

A draft is drawn with the noise that the target will use at the same place (Gumbel coupling, arXiv:2408.07978): where
both distributions are close, both draw the same token. Filters, penalties and grammars are left to the target.
Shapes depend on the number of sequences and of drafts alone, so all of this can be captured.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from millrace_kernels.sample_tokens import SampleParams, sample_tokens
from torch import Tensor

from millrace_serve.engine.step.batch import StepBatch
from millrace_serve.engine.step.slots import Accepted, Slots
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.inputs import AttnPlan, ForwardInput


class Drafter:
    def __init__(self, model: DeepseekV3, kv: Tensor, slots: Slots, simulated: Sequence[float] = ()) -> None:
        """`simulated`: Execution.simulated_acceptance"""
        self._model, self._kv, self._slots = model, kv, slots
        self._simulated = torch.tensor(simulated, device=slots.lengths.device) if simulated else None

    def accept(self, step: StepBatch[Tensor], inputs: ForwardInput, hidden: Tensor, tokens: Tensor) -> Accepted:
        """`Slots.accept`, and then the drafts of every sampling sequence go to `last_tokens`.

        Args:
            inputs: of the step; hidden: [T, D], its hidden states
            tokens: int64 [R], sampled by its rows
        """
        accepted = self._slots.accept(step, tokens, self._simulated)
        mtp = replace(inputs, token_ids=_next_tokens(step, inputs, tokens))
        hidden = self._model.forward_mtp(mtp, hidden, self._kv)[accepted.rows]
        if step.num_queries > 1 and max(step.dp_num_sampled, default=step.num_sampled):
            self._draft(step, hidden)
        return accepted

    def _draft(self, step: StepBatch[Tensor], hidden: Tensor) -> None:
        """hidden [S, D], the MTP layer's output of the row that sampled each sequence's newest token"""
        state, slots = self._slots, step.sample_slots
        temperature, seeds = state.temperature[slots], state.seeds[slots]
        newest = state.lengths[slots] - state.num_prompt[slots]  # output positions
        params = SampleParams(temperature, newest, temperature, temperature, seeds)  # there are no filters
        for draft in range(1, step.num_queries):
            if draft > 1:
                hidden = self._model.forward_mtp(draft_inputs(state, step, draft - 1), hidden, self._kv)
            logits = self._model.logits(hidden)
            tokens = sample_tokens(logits, params, newest + draft, filters=False)
            state.last_tokens[:, draft].index_copy_(0, slots, tokens)


def draft_inputs(state: Slots, step: StepBatch[Tensor], draft: int) -> ForwardInput:
    """After `Slots.accept`: the row of each sampling sequence whose token is its draft number `draft`, from 1 on."""
    count = step.sample_slots.shape[0]
    rows = state.rows(step.sample_slots, step.num_pages, 1, column=draft, ahead=draft - 1)
    attn = AttnPlan(count, rows.seq_lens, rows.page_table, (1,) * count, (0,) * count)
    where = rows.token_ids, rows.positions, rows.kv_slots
    num_tokens = step.num_rows // step.num_queries if step.is_decode else None
    return ForwardInput(*where, attn, step.sample_rows[:0], step.dp_num_sampled, num_tokens=num_tokens)


def _next_tokens(step: StepBatch[Tensor], inputs: ForwardInput, tokens: Tensor) -> Tensor:
    """int64 [T]: the token behind each row."""
    rows = step.num_decode * step.num_queries
    if step.is_decode:
        return tokens
    shared = step.next_tokens[:0] if inputs.shared is None else inputs.shared.next_tokens
    known = torch.cat((tokens[:rows], step.next_tokens, shared))
    return known.index_copy_(0, step.sample_rows[rows:], tokens[rows:])
