"""Drafts leave the distribution of sampled tokens as it is, although a draft and its target share their noise.

With the acceptance of speculative sampling (min(1, p/q)) shared noise would prefer the tokens that are drafted; with
acceptance by equality it cannot. The answers of many seeds are held against the model's own distributions.
"""

import math

import numpy as np
import pytest
from engine.drafting import engine, questions, run, tokens
from engine.harness import request
from millrace_serve.engine.step import torch_runner
from torch import Tensor

SEEDS, OUTPUTS, BINS = 384, 6, 16
Distributions = dict[tuple[int, int], np.ndarray]  # (seed, output index) -> probabilities


def answers(drafts: int, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, list[int]], Distributions, float]:
    """The tokens of each seed, the distributions that they were drawn from, and the share of accepted drafts."""
    found: Distributions = {}
    sample = torch_runner.sample

    def watched(logits: Tensor, host: object, device: object, index: Tensor, *rest: object) -> object:
        rows = zip(device.seeds.tolist(), index.tolist(), logits.softmax(-1).numpy(), strict=True)
        found.update({(seed, place): row for seed, place, row in rows})  # the last row of an output is the accepted one
        return sample(logits, host, device, index, *rest)

    monkeypatch.setattr(torch_runner, "sample", watched)
    prompt = (questions()[0] * 2)[:66]  # its first page is computed once
    asked = [request(seed, prompt, max_tokens=OUTPUTS, temperature=1.0, seed=seed) for seed in range(SEEDS)]
    one = engine(drafts, num_pages=200, max_running=64, max_waiting=SEEDS, draft_batches=(64, 64, 64))
    said = tokens(run(one, asked))
    load = one.load()
    return said, found, sum(load.accepted) / max(sum(load.drafted), 1)


def chi_square(said: dict[int, list[int]], found: Distributions) -> float:
    """Over where each token lies in the distribution of its own row, the most likely tokens first: every sixteenth of
    the mass is drawn equally often.
    """
    places, rng = [], np.random.default_rng(0)
    for seed, outputs in said.items():
        for index, token in enumerate(outputs[1:], start=1):  # no draft stands for the first one
            probs = found[seed, index]
            places.append(probs[probs > probs[token]].sum() + rng.random() * probs[token])
    counts, wanted = np.histogram(places, BINS, (0.0, 1.0))[0], len(places) / BINS
    assert counts.sum() == SEEDS * (OUTPUTS - 1)
    return float(((counts - wanted) ** 2 / wanted).sum())


@pytest.mark.long
def test_sampled_tokens_come_from_the_models_distribution() -> None:
    with pytest.MonkeyPatch.context() as patch:
        plain, plain_found, _ = answers(0, patch)
    with pytest.MonkeyPatch.context() as patch:
        drafted, drafted_found, accepted = answers(3, patch)
    assert drafted == plain and accepted > 0.1
    assert len({tuple(outputs) for outputs in plain.values()}) > SEEDS / 2, "the model is too sure to tell"
    freedom = BINS - 1
    for said, found in ((plain, plain_found), (drafted, drafted_found)):
        assert chi_square(said, found) < freedom + 4 * math.sqrt(2 * freedom)
