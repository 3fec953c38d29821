"""Sampling on a GPU over DeepSeek-V3's vocabulary against the reference on the CPU: the same tokens."""

import pytest
import torch
from kernels.graphs import captured
from millrace_testing.sampling_rows import draw_inputs, kept, kept_by_bounds, sample
from torch import Tensor

pytestmark = pytest.mark.gpu

V = 129280
NAMES = ("logits", "temperature", "top_k", "top_p", "min_p")
BOUNDARY = 1e-4  # mass within which rounding may put one token more or less into a prefix


@pytest.mark.parametrize("filters", [True, False])
@pytest.mark.parametrize("num", [0, 1, 17, 256])
def test_tokens(num: int, filters: bool) -> None:
    given = draw_inputs(num, V, device="cuda", filters=filters)
    found = sample(given)
    assert torch.equal(found, sample(given)), "equal inputs, equal tokens"
    few = {name: x[:34].cpu() if isinstance(x, Tensor) else x for name, x in given.items()}
    wanted = sample(few)
    # A token at the edge of top_p may be kept by one sum and not by the other; that one wins a draw is rarer still.
    assert (found[:34].cpu() != wanted).sum() <= (1 if filters and num > 1 else 0)


def test_not_a_number_gives_some_token() -> None:
    given = draw_inputs(6, V, device="cuda", filters=False)
    given["logits"][:3] = torch.nan
    given["logits"][3:, 7] = torch.nan
    tokens = sample(given)
    assert ((tokens >= 0) & (tokens < V)).all()


def test_kept_set() -> None:
    given = draw_inputs(33, V, seed=1, device="cuda")
    drawn = given["temperature"] > 0
    rows = [given[name][drawn] for name in NAMES]
    found, wanted = kept_by_bounds(*rows), kept(rows[0].double(), *rows[1:])
    share = torch.softmax(rows[0].double() / rows[1].double()[:, None], dim=-1)
    limited = torch.where(wanted | found, share, 0.0).sum(1)
    assert (((found != wanted) * share).sum(1) <= BOUNDARY * limited).all()
    exact = (rows[3] == 1.0) & (rows[4] == 0.0)  # top_k alone counts, and rounds nothing
    assert exact.any() and torch.equal(found[exact], wanted[exact])


def test_ties_at_a_bound_go_to_the_smaller_ids() -> None:
    logits = torch.zeros(3, 1 << 17, device="cuda")
    ones = torch.ones(3, device="cuda")
    top_k, top_p = torch.tensor([1000, 0, 5], device="cuda"), torch.tensor([1.0, 0.25, 1.0], device="cuda")
    found = kept_by_bounds(logits, ones, top_k, top_p, 0 * ones)
    ids = torch.arange(1 << 17, device="cuda")
    assert torch.equal(found, ids < torch.tensor([1000, 1 << 15, 5], device="cuda")[:, None])


def test_graph_draws_what_it_finds() -> None:
    given = draw_inputs(22, V, device="cuda")
    graph, found = captured(lambda: sample(given))
    for index in range(3):
        given["output_index"].fill_(index)
        graph.replay()
        assert torch.equal(found, sample(given))
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample(given)
    finally:
        torch.cuda.set_sync_debug_mode("default")
