"""Predictions are the measured numbers where there are any, between them elsewhere, and none outside."""

import pytest
from millrace_serve.plan import facts, predict
from millrace_serve.plan.predict import FP8, StepRanks

DECODE = [step for step in facts.steps() if step.kind == "decode"]
FULL_PREFILL = [step for step in facts.steps() if step.kind == "prefill" and step.rows * step.context >= predict.FULL]


@pytest.mark.parametrize("step", DECODE, ids=lambda step: step.ms_at)
def test_measured_steps_are_predicted_within_three_per_cent(step: facts.TimedStep) -> None:
    found = predict.decode(
        StepRanks(step.gpu, step.shape, step.ranks, step.layers, step.kv == FP8), step.rows, step.context
    )
    assert found is not None and found.ms == pytest.approx(step.ms, rel=0.03)


@pytest.mark.parametrize("step", FULL_PREFILL, ids=lambda step: step.ms_at)
def test_measured_prompts_are_predicted_within_one_per_cent(step: facts.TimedStep) -> None:
    ranks = StepRanks(step.gpu, step.shape, step.ranks, step.layers, step.kv == FP8)
    found = predict.prefill(ranks, step.context)
    assert found is not None and found.ms * step.rows * step.context == pytest.approx(step.ms, rel=0.01)


@pytest.mark.parametrize(
    "ranks", [StepRanks("H200", "ep8", 8, 61), StepRanks("H200", "tp8", 8, 61), StepRanks("H100", "ep8", 2, 28)]
)
def test_a_step_grows_with_sequences_and_context(ranks: StepRanks) -> None:
    for context in (1024, 2048):
        times = [found.ms for rows in range(1, 257) if (found := predict.decode(ranks, rows, context))]
        assert len(times) > 60 and times == sorted(times)
    assert predict.decode(ranks, 64, 1024).ms < predict.decode(ranks, 64, 2048).ms  # type: ignore[union-attr]


def test_nothing_is_said_of_what_nobody_has_timed() -> None:
    ep8 = StepRanks("H200", "ep8", 8, 61)
    assert predict.decode(ep8, 512, 1024) is None, "more sequences"
    assert predict.decode(ep8, 256, 4096) is None, "more cached tokens"
    assert predict.prefill(ep8, 8192) is None, "longer prompts"
    assert predict.prefill(StepRanks("H200", "tp8", 8, 61), 4096) is None
    assert predict.decode(StepRanks("B200", "ep8", 8, 180), 1, 1024) is None
    assert predict.decode(StepRanks("H200", "", 8, 61), 1, 1024) is None, "another shape"


def test_ranks_add_and_fp8_saves_what_this_gpu_says() -> None:
    """An H100's exchange cost it less than an H200's."""
    for gpu in ("H100", "H200"):
        one, two = (predict.decode(StepRanks(gpu, "ep8", ranks, 30), 128, 4096) for ranks in (1, 2))
        assert one is not None and two is not None and (two.ms - one.ms < 1) is (gpu == "H100")


def test_what_is_scaled_is_said() -> None:
    two, eight = (predict.decode(StepRanks("H200", "ep8", ranks, 61), 128, 4096) for ranks in (2, 8))
    assert two is not None and two.scaled == () and "h200/ranks-third.json" in two.files
    assert eight is not None and eight.scaled == ("8 ranks exchange as 2",) and eight.ms == two.ms
    half = predict.decode(StepRanks("H200", "ep8", 2, 30), 128, 4096)
    assert half is not None and half.scaled == ("by layers",) and half.ms == pytest.approx(two.ms * 30 / 61)
    fp8 = predict.decode(StepRanks("H200", "ep8", 2, 61, fp8_kv=True), 128, 4096)
    assert fp8 is not None and fp8.ms < two.ms
