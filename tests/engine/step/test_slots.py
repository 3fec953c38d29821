"""The state of slots on the device, and the rows that steps make of it, against the plainest way to compute them."""

import numpy as np
import torch
from engine.harness import TINY as LIMITS
from hypothesis import given
from hypothesis import strategies as st
from millrace_serve.engine.config import EngineConfig
from millrace_serve.engine.step.batch import SlotUpdates, StepBatch
from millrace_serve.engine.step.device import Device
from millrace_serve.engine.step.slots import Slots
from millrace_serve.engine.step.staging import Staging
from millrace_serve.model.deepseek_v3 import load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.examples import examples
from millrace_testing.paths import TINY
from torch import Tensor

CPU = torch.device("cpu")
CONFIG = EngineConfig.model_validate({**LIMITS, "max_running": 6, "num_pages": 60, "draft_tokens": 3})
SIZE = CONFIG.page_size


def int64(values: list[int]) -> np.ndarray:
    return np.array(values, np.int64)


def step_of(
    decode: list[int],
    chunks: list[tuple[int, list[int], int]],
    num_queries: int,
    updates: SlotUpdates | None = None,
    samples: list[bool] | None = None,
) -> StepBatch[Tensor]:
    """`decode`: slots; `chunks`: slot, tokens and end of each; `samples`: whether each chunk does, by default all."""
    lens = [num_queries] * len(decode) + [len(tokens) for _, tokens, _ in chunks]
    slots, cu_q = int64(decode + [slot for slot, _, _ in chunks]), np.cumsum([0, *lens], dtype=np.int32)
    sampling = [chunk for chunk in range(len(chunks)) if samples is None or samples[chunk]]
    last = [len(decode) + chunk for chunk in sampling]
    rows = list(range(len(decode) * num_queries)) + [int(cu_q[seq + 1]) - 1 for seq in last]
    batch = StepBatch(
        num_decode=len(decode),
        num_queries=num_queries,
        num_pages=CONFIG.max_pages_per_seq,
        slots=slots,
        cu_q=cu_q,
        num_rows=cu_q[-1:],
        chunk_tokens=int64([token for _, tokens, _ in chunks for token in tokens]),
        next_tokens=int64([token + 1 for _, tokens, _ in chunks for token in tokens]),
        chunk_lens=tuple(len(tokens) for _, tokens, _ in chunks),
        chunk_ends=tuple(end for _, _, end in chunks),
        sampling_chunks=tuple(sampling),
        sample_rows=int64(rows),
        sample_slots=slots[[*range(len(decode)), *last]],
        sampling=None,
        updates=updates,
    )
    return Staging(Device(), 0).upload(0, batch, StepBatch[torch.Tensor])


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[tuple[int, int]], int, int]:
    """(length, tokens that fit into the pages) of each slot, rows of a decode sequence, and how many slots decode."""
    num_queries = draw(st.integers(1, 4))
    lengths = [draw(st.integers(0, 24)) for _ in range(6)]
    pages = [draw(st.integers(length // SIZE + 1, CONFIG.max_pages_per_seq)) for length in lengths]
    return [(n, count * SIZE) for n, count in zip(lengths, pages, strict=True)], num_queries, draw(st.integers(0, 6))


def test_outputs_are_numbered_from_the_end_of_the_prompt() -> None:
    """The row of the last prompt token gives output 0; a decode row at position 7 behind 5 prompt tokens output 3."""
    state = Slots(CONFIG, CPU)
    state.num_prompt.copy_(torch.tensor([5, 5, 9, 9, 9, 9, 9]))
    step = step_of([1], [(0, [20, 21], 5)], 2)
    assert state.output_index(torch.tensor([7, 8, 4]), step).tolist() == [3, 4, 0]


@given(cases(), st.randoms(use_true_random=False))
@examples(30)
def test_rows_are_where_the_tokens_belong(case: tuple[list[tuple[int, int]], int, int], random) -> None:
    spans, q, num_decode = case
    order = random.sample(range(6), 6)
    free = random.sample(range(1, 60), 59)
    pages = [[free.pop() for _ in range(capacity // SIZE)] for _, capacity in spans]
    state = Slots(CONFIG, CPU)
    state.page_table.fill_(59)  # what former owners left
    state.last_tokens.copy_(torch.arange(28).view(7, 4) + 100)
    updates = SlotUpdates(
        page_slots=int64([slot for slot in range(6) for _ in pages[slot]]),
        page_indexes=int64([index for slot in range(6) for index in range(len(pages[slot]))]),
        pages=np.array([page for slot in range(6) for page in pages[slot]], np.int32),
        grown=int64(list(range(6))),
        capacity=int64([capacity for _, capacity in spans]),
        joined=int64(list(range(6))),
        lengths=int64([length for length, _ in spans]),
        last_tokens=np.arange(24).reshape(6, 4) + 100,
        num_prompt=int64([0] * 6),
        temperature=np.ones(6, np.float32),
        seeds=np.arange(6, dtype=np.uint64),
    )
    decode, others = order[:num_decode], order[num_decode:]
    chunks = []
    for slot in others:
        length, capacity = spans[slot]
        count = min(random.randint(1, 5), capacity - length)
        chunks.append((slot, [500 + 10 * slot + i for i in range(count)], length + count))
    step = step_of(decode, chunks, q, updates)
    state.update(step.updates)
    inputs = state.inputs(step)

    expected = []
    for slot in decode:
        expected += [(100 + 4 * slot + i, spans[slot][0] + i, slot) for i in range(q)]
    for slot, tokens, end in chunks:
        expected += [(token, end - len(tokens) + i, slot) for i, token in enumerate(tokens)]
    assert inputs.token_ids.tolist() == [token for token, _, _ in expected]
    assert inputs.positions.tolist() == [position for _, position, _ in expected]
    assert inputs.kv_slots.tolist() == [
        pages[slot][position // SIZE] * SIZE + position % SIZE if position < spans[slot][1] else 0
        for _, position, slot in expected
    ]
    ends = [spans[slot][0] + q for slot in decode] + [end for _, _, end in chunks]
    assert inputs.attn.seq_lens.tolist() == ends and inputs.attn.num_decode == num_decode
    assert inputs.attn.q_lens_host == (q,) * num_decode + tuple(len(tokens) for _, tokens, _ in chunks)
    for row, slot in enumerate([*decode, *others]):
        assert inputs.attn.page_table[row, : len(pages[slot])].tolist() == pages[slot]

    if q == 1:
        sampled = torch.arange(len(step.sample_slots)) + 900
        state.accept(step, sampled)
        for slot, token in zip([*decode, *others], sampled.tolist(), strict=True):
            end = spans[slot][0] + 1 if slot in decode else next(e for s, _, e in chunks if s == slot)
            assert (int(state.lengths[slot]), int(state.last_tokens[slot, 0])) == (end, token)


def test_several_rows_of_a_sequence_are_several_steps_at_once() -> None:
    """The logits of q rows equal those of q steps with one row each: what drafts are verified with."""
    torch.set_num_threads(1)
    model = load_model(TINY, ParallelDims(), CPU, torch.float32)
    config = EngineConfig(num_pages=8, max_model_len=192, max_running=2, draft_tokens=3)
    prompt, drafts = [10 + 7 * i % 300 for i in range(61)], [31, 77, 5, 140]

    def run(q: int) -> Tensor:
        kv = torch.zeros(8, model.config.num_kv_layers, 64, model.config.kv_row_dim)
        state, found = Slots(config, CPU), []
        state.page_table[0, :3], state.capacity[0] = torch.tensor([3, 1, 6]), 192
        first = step_of([], [(0, prompt, len(prompt))], q)
        model.forward(state.inputs(first), kv)
        state.accept(first, torch.tensor(drafts[:1]))
        for start in range(0, len(drafts), q):
            state.last_tokens[0, :q] = torch.tensor(drafts[start : start + q])
            step = step_of([0], [], q)
            found.append(model.logits(model.forward(state.inputs(step), kv)))
            state.lengths[0] += q
        return torch.cat(found)

    steps = run(1)
    for q in (2, 4):
        torch.testing.assert_close(run(q), steps, rtol=1e-4, atol=1e-4)
        assert torch.equal(run(q).argmax(-1), steps.argmax(-1))
