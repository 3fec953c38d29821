"""The kernels of a decode step around the model, through the interpreter: bit for bit what their references give."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from millrace_kernels.accept_drafts import accept_drafts
from millrace_kernels.backend import forced
from millrace_kernels.decode_rows import SlotState, decode_rows
from millrace_kernels.embed_part import embed_part
from millrace_testing.examples import examples
from torch import Tensor

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SLOTS, KNOWN, PAGE, PAGES = 9, 4, 4, 7  # the last slot is padding
OURS = {
    op: f"millrace_kernels.triton.{op.partition('.')[0]}:{op.partition('.')[2]}"
    for op in ("decode_rows.decode_rows", "accept_drafts.accept_drafts", "embed_part.embed_part")
}
REFERENCES = dict.fromkeys(OURS, "")
Case = tuple[SlotState, Tensor, int, torch.Generator]


def int64(*shape: int, low: int, high: int, rng: torch.Generator) -> Tensor:
    return torch.randint(low, high, shape, generator=rng).to(DEVICE)


@st.composite
def states(draw: st.DrawFn) -> Case:
    """What is kept of the slots, the slots of a step with padding, its rows of each, and where numbers come from."""
    rng = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    lengths = int64(SLOTS, low=0, high=PAGE * PAGES, rng=rng)
    last_tokens = int64(SLOTS, KNOWN, low=-1, high=3, rng=rng)  # so few tokens that drafts are often right
    state = SlotState(lengths, lengths + int64(SLOTS, low=0, high=6, rng=rng), last_tokens)
    state.lengths[-1] = state.capacity[-1] = 0
    order = draw(st.permutations(range(SLOTS - 1)))
    slots = [*order[: draw(st.integers(0, SLOTS - 1))], *[SLOTS - 1] * draw(st.integers(0, 2))]
    return state, torch.tensor(slots, dtype=torch.int64, device=DEVICE), draw(st.integers(1, KNOWN)), rng


@given(states(), st.integers(0, 2), st.integers(1, PAGES + 2))
@examples(20)
def test_decode_rows(case: Case, ahead: int, num_pages: int) -> None:
    state, slots, q, rng = case
    table = int64(SLOTS, PAGES + 2, low=0, high=99, rng=rng).int()[:, :num_pages]
    where = {"page_size": PAGE, "num_queries": q, "column": min(ahead, KNOWN - q), "ahead": ahead}
    with forced(**OURS):
        found = decode_rows(slots, state, table, **where)
    with forced(**REFERENCES):
        wanted = decode_rows(slots, state, table, **where)
    assert (wanted.seq_lens <= num_pages * PAGE).all(), "attention would read behind the page table"
    for name, expected in wanted._asdict().items():
        assert torch.equal(getattr(found, name), expected) and getattr(found, name).dtype == expected.dtype, name


@given(states(), st.booleans())
@examples(25)
def test_accept_drafts(case: Case, simulates: bool) -> None:
    state, slots, q, rng = case
    tokens = int64(len(slots) * q, low=0, high=3, rng=rng)
    simulated = torch.tensor([0.9, 0.5, 0.2], device=DEVICE) if simulates else None
    results = []
    for targets in (OURS, REFERENCES):
        after = SlotState(*(values.clone() for values in state))
        out = torch.full((3, len(slots) + 2), 77, device=DEVICE)
        with forced(**targets):
            accept_drafts(slots, tokens, after, out=out[:, : len(slots)], simulated=simulated)
        after.last_tokens[-1] = 0  # of several padding sequences any may be the last
        results.append([out, *after])
    for found, wanted in zip(*results, strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(("num", "held", "width"), [(0, 5, 8), (1, 0, 8), (7, 5, 8), (6, 3, 1500)])
def test_embed_part(num: int, held: int, width: int) -> None:
    rng = torch.Generator().manual_seed(num)
    weight = torch.randn(held + 1, width, generator=rng).bfloat16().to(DEVICE)[:held]
    tokens = torch.tensor([-1, 4, 3, 9, 5, 6, 1 << 40][:num], dtype=torch.int64, device=DEVICE)
    with forced(**OURS):
        found = embed_part(tokens, weight, 4)
    rows = [weight[token - 4] if 0 <= token - 4 < held else torch.zeros_like(found[0]) for token in tokens.tolist()]
    assert found.shape == (num, width) and all(torch.equal(*pair) for pair in zip(found, rows, strict=True))
    if held:
        with forced(**REFERENCES):
            assert torch.equal(embed_part(tokens, weight, 4), found)
