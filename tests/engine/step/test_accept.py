"""Which drafts are accepted, and what a step leaves in the slots, against plain Python."""

from dataclasses import dataclass

import pytest
import torch
from engine.step.test_slots import CONFIG, CPU, SIZE, step_of
from hypothesis import given
from hypothesis import strategies as st
from millrace_serve.engine.drafts.speculate import draft_inputs
from millrace_serve.engine.step.batch import StepBatch
from millrace_serve.engine.step.slots import NONE, Slots, accepted_rows, by_sequence
from millrace_testing.examples import examples
from torch import Tensor

TOKENS = st.integers(0, 2)  # so few that drafts are often right
DRAFTS = st.integers(NONE, 2)


@dataclass
class Decode:
    slot: int
    length: int
    room: int  # positions from `length` on that have a page
    drafts: list[int]
    sampled: list[int]  # of its rows

    @property
    def count(self) -> int:
        """Tokens that the step adds."""
        count = min(1, self.room)
        while count < min(self.room, len(self.sampled)) and self.drafts[count - 1] == self.sampled[count - 1]:
            count += 1
        return count

    @property
    def drafted(self) -> int:
        known = [*self.drafts, NONE].index(NONE)
        return min(known, max(self.room - 1, 0))


@dataclass
class Prompt:
    slot: int
    length: int
    count: int  # tokens of the chunk
    sampled: int | None


@dataclass
class Case:
    q: int
    decode: list[Decode]
    chunks: list[Prompt]

    def step(self) -> StepBatch[Tensor]:
        chunks = [(one.slot, [7] * one.count, one.length + one.count) for one in self.chunks]
        samples = [one.sampled is not None for one in self.chunks]
        return step_of([one.slot for one in self.decode], chunks, self.q, samples=samples)

    def slots(self) -> Slots:
        state = Slots(CONFIG, CPU)
        state.page_table.copy_(1 + torch.arange(state.page_table.numel()).view_as(state.page_table))
        for one in self.decode:
            state.lengths[one.slot], state.capacity[one.slot] = one.length, one.length + one.room
            state.last_tokens[one.slot] = torch.tensor([5, *one.drafts, *[9] * (4 - self.q)])
        for chunk in self.chunks:
            state.lengths[chunk.slot] = chunk.length
            state.capacity[chunk.slot] = chunk.length + chunk.count
        return state

    def sampled(self) -> Tensor:
        ends = [one.sampled for one in self.chunks if one.sampled is not None]
        return torch.tensor([token for one in self.decode for token in one.sampled] + ends, dtype=torch.int64)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    q, order = draw(st.integers(1, 4)), draw(st.permutations(range(6)))
    num_decode = draw(st.integers(0, 6))

    def several(values: st.SearchStrategy[int], count: int) -> list[int]:
        return draw(st.lists(values, min_size=count, max_size=count))

    lengths = st.integers(0, 20)
    least = 1 if q == 1 else 0  # without drafts the host knows that each row has a page
    decode = [
        Decode(slot, draw(lengths), draw(st.integers(least, 5)), several(DRAFTS, q - 1), several(TOKENS, q))
        for slot in order[:num_decode]
    ]
    chunks = [
        Prompt(slot, draw(lengths), draw(st.integers(1, 4)), draw(st.none() | TOKENS)) for slot in order[num_decode:]
    ]
    return Case(q, decode, chunks)


@given(cases())
@examples(40)
def test_longest_prefix_of_equal_drafts_is_accepted(case: Case) -> None:
    state, step = case.slots(), case.step()
    accepted = state.accept(step, case.sampled())
    ending = [one for one in case.chunks if one.sampled is not None]
    assert accepted.counts.tolist() == [one.count for one in case.decode] + [1] * len(ending)
    assert accepted.drafted.tolist() == [one.drafted for one in case.decode] + [0] * len(ending)
    newest = [index * case.q + max(one.count - 1, 0) for index, one in enumerate(case.decode)]
    assert accepted.rows.tolist() == newest + step.sample_rows[len(case.decode) * case.q :].tolist()
    for one in case.decode:
        assert int(state.lengths[one.slot]) == one.length + one.count
        assert state.last_tokens[one.slot].tolist() == [one.sampled[max(one.count - 1, 0)], NONE, NONE, NONE]
    for chunk in case.chunks:
        assert int(state.lengths[chunk.slot]) == chunk.length + chunk.count
        if chunk.sampled is not None:
            assert state.last_tokens[chunk.slot].tolist() == [chunk.sampled, NONE, NONE, NONE]
    taken = [row < one.count for one in case.decode for row in range(case.q)]
    assert accepted_rows(step, accepted).tolist() == taken + [True] * len(ending)
    chunk_rows = [[one.sampled] + [0] * (case.q - 1) for one in ending]
    assert by_sequence(case.sampled(), step).tolist() == [one.sampled for one in case.decode] + chunk_rows


@given(cases())
@examples(15)
def test_row_takes_the_drafts_before_it_for_outputs(case: Case) -> None:
    expected = []
    for one in case.decode:
        expected += [one.drafts[:row] + [NONE] * (case.q - 1 - row) for row in range(case.q)]
    expected += [[NONE] * (case.q - 1) for one in case.chunks if one.sampled is not None]
    before = case.slots().tokens_before(case.step())
    assert before.tolist() == expected and before.shape == (len(expected), case.q - 1)


@given(cases(), st.integers(1, 2))
@examples(15)
def test_draft_is_a_row_behind_the_newest_token(case: Case, draft: int) -> None:
    """The KV of the MTP layer for a position without a page goes to the sink."""
    state, step = case.slots(), case.step()
    state.accept(step, case.sampled())
    state.last_tokens[:, draft] = 40 + torch.arange(len(state.last_tokens))
    inputs = draft_inputs(state, step, draft)
    slots = step.sample_slots.tolist()
    positions = [int(state.lengths[slot]) + draft - 1 for slot in slots]
    assert inputs.token_ids.tolist() == [40 + slot for slot in slots]
    assert inputs.positions.tolist() == positions
    assert inputs.attn.seq_lens.tolist() == [position + 1 for position in positions]
    assert inputs.kv_slots.tolist() == [
        int(state.page_table[slot, position // SIZE]) * SIZE + position % SIZE if position < state.capacity[slot] else 0
        for slot, position in zip(slots, positions, strict=True)
    ]
    assert inputs.attn.num_decode == len(slots) and inputs.attn.q_lens_host == (1,) * len(slots)
    if case.chunks:
        assert inputs.num_tokens is None
    else:
        assert inputs.num_tokens.tolist() == [len(slots)]


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_simulated_acceptance_does_not_look_at_drafts(share: float) -> None:
    case = Case(3, [Decode(2, 8, 5, [1, NONE], [2, 0, 1]), Decode(4, 9, 1, [1, 2], [1, 2, 0])], [])
    state = case.slots()
    accepted = state.accept(case.step(), case.sampled(), torch.full((3,), share))
    assert accepted.counts.tolist() == ([3, 1] if share else [1, 1])
    assert state.last_tokens[:, 0].tolist()[2:5:2] == ([1, 1] if share else [2, 1])
