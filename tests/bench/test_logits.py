"""Logits against FP32 on a CPU: the measure, and the checkpoint's."""

import pytest
import torch
from millrace_bench.eval import logits
from millrace_bench.eval.perplexity import checkpoint_logits
from millrace_testing.paths import TINY


def test_the_measure() -> None:
    wanted = torch.tensor([[3.0, 4.0], [0.0, 5.0], [5.0, 0.0]])
    found = wanted + torch.tensor([[0.0, 0.0], [0.0, 0.5], [0.0, 6.0]])
    line = logits.compare("BF16", "prompt", found, wanted, 0.11)
    assert (line.tokens, line.passed) == (3, True) and line.same_choice == pytest.approx(2 / 3)
    assert (line.median, line.largest) == (pytest.approx(0.1), pytest.approx(1.2))
    assert not logits.compare("BF16", "prompt", found * torch.nan, wanted, 0.11).passed


def test_outputs_are_what_a_prompt_is() -> None:
    """In FP32 the absorbed steps give what the prompt gives: only rounding differs."""
    ids = [0, *range(100, 190)]
    whole, steps = (checkpoint_logits(TINY, "cpu", torch.float32, decoded=count)(ids) for count in (0, 30))
    assert whole.shape == steps.shape and float((whole - steps).norm() / whole.norm()) < 1e-5
    assert torch.equal(whole.argmax(1), steps.argmax(1))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_the_checkpoint_stays_within_its_tolerance(device: str) -> None:
    found = logits.lines(TINY, device, num_texts=1)
    assert [(line.weights, line.path) for line in found] == [
        ("BF16", "prompt"), ("BF16", "outputs"), ("FP8", "prompt"), ("FP8", "outputs")
    ]  # fmt: skip
    assert all(line.passed and line.same_choice > 0.85 for line in found), found
    assert found[3].tokens == logits.DECODED
