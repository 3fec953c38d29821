"""The training model's parts against their definitions, and its checkpoint against transformers."""

import json

import pytest
import torch
import torch.nn.functional as F
from millrace_testing.paths import TINY
from millrace_training import checkpoint
from millrace_training.checkpoint import INDEX_FILE
from millrace_training.model import Gate
from safetensors.torch import load_file
from transformers import DeepseekV3ForCausalLM


def _tokens(config, length=40):
    return torch.randint(5, config.vocab_size, (2, length), generator=torch.Generator().manual_seed(1))


def test_mtp_shapes_and_loss(micro_model, micro_config):
    tokens = _tokens(micro_config)
    logits, drafts = micro_model(tokens)
    assert logits.shape == (2, 40, micro_config.vocab_size)
    assert drafts.shape == (2, 39, micro_config.vocab_size)
    weights = torch.ones(2, 40)
    weights[:, :10] = 0
    loss, mtp_loss = micro_model.losses(tokens, weights)
    wanted = F.cross_entropy(logits[:, 9:38].flatten(0, 1), tokens[:, 10:39].flatten())
    wanted_mtp = F.cross_entropy(drafts[:, 8:38].flatten(0, 1), tokens[:, 10:].flatten())
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-5)
    assert mtp_loss.item() == pytest.approx(wanted_mtp.item(), rel=1e-5)


def test_mtp_does_not_see_the_token_it_drafts(micro_model, micro_config):
    tokens = _tokens(micro_config)
    changed = tokens.clone()
    changed[:, 20] = 7
    before, after = micro_model(tokens)[1], micro_model(changed)[1]
    assert torch.equal(before[:, :19], after[:, :19])  # drafts[18] is for position 20
    assert not torch.equal(before[:, 19], after[:, 19])


def test_bias_update_moves_load_away_from_the_busy_expert(micro_config):
    gate = Gate(micro_config).train()
    gate.e_score_correction_bias[2] = 10.0  # every token takes it
    gate(torch.randn(64, micro_config.hidden_size))
    assert gate.load[2] == 64
    assert gate.update_bias(0.001) == pytest.approx(4.0)  # 64 of 128 choices over 8 experts
    assert gate.e_score_correction_bias[2] == pytest.approx(9.999)
    assert (gate.e_score_correction_bias > 0).any()
    assert gate.load.sum() == 0


@pytest.mark.parametrize("which", ["micro", "shipped"])
def test_transformers_computes_the_same_logits(which, micro_model, tmp_path):
    directory = TINY
    if which == "micro":
        for gate in micro_model.gates():
            gate.e_score_correction_bias.uniform_(-0.3, 0.3)
        checkpoint.save(micro_model, tmp_path)
        directory = tmp_path
    ours = checkpoint.load(directory).float()
    theirs = DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = _tokens(ours.config, length=200)
    with torch.no_grad():
        wanted = theirs(tokens).logits
        found, _ = ours(tokens)
    assert (found - wanted).norm() / wanted.norm() < 1e-4


def test_checkpoint_round_trip_keeps_every_parameter(micro_model, tmp_path):
    checkpoint.save(micro_model, tmp_path)
    loaded = checkpoint.load(tmp_path).state_dict()
    for name, value in micro_model.state_dict().items():
        rounded = value if name.endswith("bias") else value.bfloat16()
        assert torch.equal(loaded[name], rounded), name


def test_published_layout(micro_model, micro_config, tmp_path):
    checkpoint.save(micro_model, tmp_path)
    index = json.loads((tmp_path / INDEX_FILE).read_text())["weight_map"]
    mtp = f"model.layers.{micro_config.num_hidden_layers}"
    parts = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head", "input_layernorm")
    assert {f"{mtp}.{part}.weight" for part in parts} <= set(index)
    assert f"{mtp}.mlp.experts.7.down_proj.weight" in index
    tensors = {name: tensor for file in set(index.values()) for name, tensor in load_file(tmp_path / file).items()}
    assert tensors.keys() == index.keys()
    assert torch.equal(tensors[f"{mtp}.embed_tokens.weight"], tensors["model.embed_tokens.weight"])
    biases = {name for name, tensor in tensors.items() if tensor.dtype is torch.float32}
    assert biases == {name for name in tensors if name.endswith("e_score_correction_bias")}
