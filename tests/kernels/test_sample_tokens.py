"""Sampling's kernels through the interpreter: the tokens, the kept sets and the noise of the reference."""

import pytest
import torch
import triton
import triton.language as tl
from millrace_kernels.backend import forced
from millrace_kernels.sample_tokens import gumbel_noise
from millrace_kernels.triton import sample_candidates, sample_filter
from millrace_kernels.triton.sample_tokens import _estimated_noise, _noise
from millrace_testing.sampling_rows import draw_inputs, kept, kept_by_bounds, sample
from torch import Tensor

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU test_gpu_sampling.py runs the kernels")

OURS = {"sample_tokens.sample_tokens": "millrace_kernels.triton.sample_tokens:sample_tokens"}


def both(**given: object) -> tuple[Tensor, Tensor]:
    with forced(**OURS):
        found = sample(given)
    wanted = sample(given)
    assert found.dtype == wanted.dtype == torch.int64
    return found, wanted


def filters(top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0, temperature: float = 1.0) -> dict[str, Tensor]:
    return {
        "temperature": torch.tensor([temperature]),
        "top_k": torch.tensor([top_k]),
        "top_p": torch.tensor([top_p]),
        "min_p": torch.tensor([min_p]),
    }


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize(("num", "vocab"), [(0, 100), (1, 1), (2, 24), (17, 1500), (11, 5000)])
def test_like_the_reference(num: int, vocab: int, wanted: bool) -> None:
    found, expected = both(**draw_inputs(num, vocab, filters=wanted))
    assert torch.equal(found, expected)


def test_greedy_rows_alone() -> None:
    given = draw_inputs(3, 3000)
    given["logits"][1, [7, 2500]] = 50.0
    found, expected = both(**(given | {"temperature": torch.zeros(3), "draws": False}))
    assert torch.equal(found, expected) and found[1] == 7


def test_noise_is_the_references_bit_for_bit() -> None:
    """Two logits so far above the others that the noise of one against that of the other decides."""
    given = draw_inputs(64, 24, filters=False) | {"temperature": torch.ones(64)}
    noise = gumbel_noise(given["seeds"], given["output_index"], 24)
    given["logits"] = torch.full((64, 24), -100.0)
    given["logits"][:, 5], given["logits"][:, 20] = 0.0, noise[:, 5] - noise[:, 20]  # a tie, or an ulp beside it
    found, expected = both(**given)
    assert torch.equal(found, expected) and set(found.tolist()) == {5, 20}


@triton.jit
def both_noises(out, bits, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    some = tl.load(bits + at).to(tl.uint32)
    tl.store(out + at, _estimated_noise(some))
    tl.store(out + COUNT + at, _noise(some))


def test_estimates_of_noise_are_near() -> None:
    edges = [0, 1, 2**31, 2**32 - 4294968, 2**32 - 4294967, 2**32 - 2**20, 2**32 - 2, 2**32 - 1]
    bits = torch.cat((torch.tensor(edges), torch.randint(2**32, (1016,), generator=torch.Generator().manual_seed(0))))
    estimated, noise = out = torch.zeros(2, 1024)
    both_noises[(1,)](out, bits, COUNT=1024)
    exact = -torch.log(-torch.log((bits.double() + 0.5) * 2.0**-32))
    assert torch.equal(noise, exact.float()) and (estimated - exact).abs().max() < 2**-9


LOGITS = ("drawn", "ties", "equal", "signed zeros", "few allowed", "one allowed")
GIVEN: tuple[dict[str, float], ...] = (
    {"top_k": 3}, {"top_k": 1}, {"top_k": 4999}, {"top_k": 5000}, {"top_p": 0.30007}, {"top_p": 1e-12},
    {"top_p": 0.0}, {"top_p": 0.99999}, {"min_p": 0.3}, {"min_p": 1.0}, {"top_k": 17, "top_p": 0.33, "min_p": 0.1},
    {"top_k": 300, "top_p": 0.9, "temperature": 3.0},
)  # fmt: skip
# Each filter over two kinds of logits, through the candidates and where there are too many of them.
KEPT = [(LOGITS[(index + 3 * turn) % 6], (60, sample_candidates.MOST)[(index + turn) % 2], given)
        for turn in (0, 1) for index, given in enumerate(GIVEN)]  # fmt: skip


@pytest.mark.parametrize(("logits", "most", "given"), [*KEPT, *(("drawn", 60, given) for given in GIVEN[4:])], ids=str)
def test_kept_set_is_the_references(
    logits: str, most: int, given: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sample_candidates, "MOST", most)
    x = torch.randn(1, 5000, generator=torch.Generator().manual_seed(1)) * 2
    if logits == "ties":
        x = (x * 2).round()
    elif logits == "equal":
        x = torch.full((1, 5000), -3.5)
    elif logits == "signed zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    elif logits == "few allowed":
        x[:, torch.arange(5000) % 700 != 5] = -torch.inf
    elif logits == "one allowed":
        x[:, torch.arange(5000) != 4321] = -torch.inf
    values = filters(**given)
    assert torch.equal(kept_by_bounds(x, **values), kept(x.double(), **values))


@pytest.mark.parametrize(
    ("given", "nats"),
    [({"top_k": 1999}, 3), ({"top_k": 1}, 0.25), ({"top_p": 0.9}, 2.5), ({"top_p": 0.999999}, 10)],
    ids=str,
)
def test_candidates(given: dict[str, float], nats: float) -> None:
    """All within so many nats of the best, in the order of ids, here of two blocks."""
    x = -torch.arange(10000.0)[None].remainder(50) / 5  # 200 tokens each at 0, -0.2, -0.4, ...
    x[:, ::3] = -torch.inf
    rows = filters(**given)
    found = sample_candidates.candidates(x, log_min_p=rows.pop("min_p").log(), **rows)
    wanted = x[(x >= -nats) & (x > -torch.inf)]
    assert found.sizes.item() == len(wanted) and torch.equal(found.values[0, : len(wanted)], wanted)
    assert found.tops.item() == 0.0 and found.masses.item() == pytest.approx(x.exp().sum().item())


def test_row_of_nothing_gives_token_0() -> None:
    given = draw_inputs(4, 2000)
    given["logits"][:] = -torch.inf
    with forced(**OURS):
        assert sample(given).tolist() == [0, 0, 0, 0]


def test_rows_do_not_look_at_each_other_nor_past_their_end() -> None:
    given = draw_inputs(11, 1500)
    wide = torch.full((11, 4000), torch.nan)
    wide[:, :1500] = given["logits"]
    with forced(**OURS):
        together = sample(given | {"logits": wide[:, :1500]})
        for row in range(11):
            alone = {name: x[row : row + 1] for name, x in given.items() if isinstance(x, Tensor)}
            assert sample(alone) == together[row]


def test_search_visits_few_probes() -> None:
    """Its interval ends at values that occur, so two values are told apart at once."""
    x = torch.full((1, 600), -30.0)
    x[0, 77] = 30.0
    values, lasts = sample_filter.bounds(x, **filters(top_k=1))
    assert values.tolist() == [30.0] and int(lasts) >= 77
