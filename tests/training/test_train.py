"""The training loop at a size where a step takes milliseconds."""

import json
import math

import pytest
import torch
from millrace_bench.tasks import TASKS
from millrace_testing.paths import TINY
from millrace_training import train as training
from millrace_training.batches import Batches, loader
from millrace_training.optimizer import Muon, orthogonalize
from millrace_training.plot import draw
from millrace_training.probe import Probe
from millrace_training.recipe import Mixture, Phase, Recipe, Stage
from millrace_training.train import Trainer


@pytest.fixture
def batches(micro_recipe, data_dir):
    return Batches(micro_recipe, data_dir, TINY / "tokenizer.json")


def _run(trainer, batches, steps):
    losses = []
    for tokens, weights in loader(batches, trainer.step, workers=0):
        losses.append({name: value.item() for name, value in trainer.train_step(tokens, weights).items()})
        if len(losses) == steps:
            break
    return losses


def test_few_steps_lower_both_losses(micro_config, data_dir):
    text = Mixture(text=1, retrieval=0, short=0, copy=1, addition=1, sort=1, chat=1, known=1)
    recipe = Recipe((Phase((Stage(20, 48, 4),), 1e-2, text),), warmup_steps=3)
    losses = _run(Trainer(micro_config, recipe), Batches(recipe, data_dir, TINY / "tokenizer.json"), steps=20)
    for name in ("loss", "mtp_loss"):
        assert losses[0][name] == pytest.approx(math.log(micro_config.vocab_size), rel=0.2)  # knows nothing yet
        assert losses[-1][name] < losses[0][name] - 1
    assert all(math.isfinite(value) for step in losses for value in step.values())


def test_resume_gives_the_same_losses(micro_config, micro_recipe, batches, tmp_path):
    whole = _run(Trainer(micro_config, micro_recipe), batches, steps=16)
    first = Trainer(micro_config, micro_recipe)
    _run(first, batches, steps=9)
    torch.save(first.state(), tmp_path / "state.pt")
    second = Trainer(micro_config, micro_recipe)
    second.restore(torch.load(tmp_path / "state.pt"))
    assert second.tokens == first.tokens
    assert _run(second, batches, steps=7) == whole[9:]


def test_resume_with_another_recipe_is_refused(micro_config, micro_recipe):
    trainer = Trainer(micro_config, micro_recipe)
    with pytest.raises(ValueError, match="another recipe"):
        Trainer(micro_config, Recipe()).restore(trainer.state())


def test_train_logs_probes_and_saves(micro_config, micro_recipe, batches, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "LOG_EVERY", 6)
    monkeypatch.setattr(training, "PROBE_EVERY", 12)
    monkeypatch.setattr("millrace_training.probe.TASKS", {"addition": TASKS["addition"]})
    trainer = Trainer(micro_config, micro_recipe)
    training.train(trainer, batches, Probe(batches.chat, "cpu", items=2), tmp_path, math.inf, workers=0)
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [6, 12, 18, 24]
    assert [row["step"] for row in rows if "addition" in row] == [12, 24]
    assert torch.load(tmp_path / "state.pt")["step"] == micro_recipe.steps
    svg = draw(rows)
    assert svg.count("<polyline") == 9
    assert "nan" not in svg


def test_learning_rate_warms_up_and_falls_in_every_phase(micro_recipe):
    rates = [micro_recipe.lr(step) for step in range(micro_recipe.steps)]
    assert rates[2] == rates[3] == max(rates) == 1e-2
    assert rates[17] < 0.05 * 1e-2
    assert rates[18] == pytest.approx(2e-3 / 3)
    assert max(rates[18:]) == 2e-3
    with pytest.raises(IndexError):
        micro_recipe.lr(micro_recipe.steps)


def test_batches_follow_the_stages_and_depend_on_the_step_alone(batches):
    for step, shape in ((0, (4, 50)), (12, (2, 98)), (18, (4, 50))):
        tokens, weights = batches[step]
        assert tokens.shape == weights.shape == shape
        assert torch.equal(tokens, batches[step][0])
        assert set(weights.unique().tolist()) <= {0.0, 1.0, 2.0}
    assert not torch.equal(batches[0][0], batches[1][0])


def test_orthogonalize_evens_out_the_singular_values():
    matrices = torch.randn(3, 24, 40, generator=torch.Generator().manual_seed(0))
    for stack in (matrices, matrices.mT):
        values = torch.linalg.svdvals(orthogonalize(stack).float())
        assert values.min() > 0.4
        assert values.max() < 1.3


def test_muon_keeps_its_momentum_in_bfloat16_over_a_resume():
    parameter = torch.nn.Parameter(torch.randn(4, 6))
    saved = Muon([parameter], 1e-3, 0.0).state_dict()
    muon = Muon([parameter], 1e-3, 0.0)
    muon.load_state_dict(saved)
    assert muon.state[parameter]["momentum"].dtype is torch.bfloat16
