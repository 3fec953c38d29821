"""The MTP step against a decoder layer of transformers wired as in the paper."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from millrace_serve.model.checkpoint.shapes import tensor_bytes, weight_bytes
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import PLAIN
from millrace_testing.checkpoint import CONFIG
from millrace_testing.tolerances import MODEL_TOLERANCE, assert_close
from model.harness import Driver, Seq, random_prompt
from safetensors.torch import load_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM


@pytest.fixture(scope="module")
def model(random_bf16: Path) -> DeepseekV3:
    return load_model(random_bf16, ParallelDims(), torch.device("cpu"), torch.float32)


def expected_logits(path: Path, next_tokens: list[int], hidden: Tensor) -> Tensor:
    """transformers' own stack of one MoE layer, fed with eh_proj's output as its embedding."""
    tensors = {k: v.float() for file in path.glob("*.safetensors") for k, v in load_file(file).items()}
    prefix = f"model.layers.{CONFIG['num_hidden_layers']}."
    layer = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], layer[name], 1e-6)

    embedded = F.embedding(torch.tensor(next_tokens), tensors["model.embed_tokens.weight"])
    x = torch.cat((norm(embedded, "enorm.weight"), norm(hidden, "hnorm.weight")), -1) @ layer["eh_proj.weight"].T
    one = {**CONFIG, "num_hidden_layers": 1, "first_k_dense_replace": 0, "num_nextn_predict_layers": 0}
    hf = DeepseekV3ForCausalLM(DeepseekV3Config(**one)).eval()
    state = {name: value for name, value in layer.items() if "experts." not in name or "shared" in name}
    ours = {f"model.layers.0.{name}": value for name, value in state.items()}
    expert = [f"mlp.experts.{index}." for index in range(CONFIG["n_routed_experts"])]
    w13 = [torch.cat((layer[e + "gate_proj.weight"], layer[e + "up_proj.weight"])) for e in expert]
    ours["model.layers.0.mlp.experts.gate_up_proj"] = torch.stack(w13)
    ours["model.layers.0.mlp.experts.down_proj"] = torch.stack([layer[e + "down_proj.weight"] for e in expert])
    ours["model.norm.weight"], ours["lm_head.weight"] = layer["shared_head.norm.weight"], tensors["lm_head.weight"]
    missing, _ = hf.load_state_dict(ours, strict=False)
    assert missing == ["model.embed_tokens.weight"]
    with torch.no_grad():
        return hf(inputs_embeds=x[None]).logits[0]


def test_mtp_logits(model: DeepseekV3, random_bf16: Path) -> None:
    tokens = random_prompt(141, model.config.vocab_size, 1)
    driver, whole = Driver(model), Seq(tokens[:140])
    inputs = driver.build([(whole, 140)])
    hidden = model.forward(inputs, driver.kv)

    drafter, drafts = Driver(model, seed=1), []
    shifted, start = Seq(tokens[1:]), 0
    for num in (100, 38, 1, 1):  # a prompt in two chunks, then decode steps
        step = drafter.build([(shifted, num)])
        out = model.forward_mtp(step, hidden[start : start + num], drafter.kv)
        drafts.append(model.logits(out))
        shifted.computed, start = shifted.computed + num, start + num
    assert_close(torch.cat(drafts), expected_logits(random_bf16, tokens[1:], hidden), MODEL_TOLERANCE)


def test_mtp_step_writes_only_its_own_layer(model: DeepseekV3) -> None:
    driver, seq = Driver(model), Seq(random_prompt(20, model.config.vocab_size, 1))
    inputs = driver.build([(seq, 20)])
    model.forward_mtp(inputs, torch.zeros(20, model.config.hidden_size), driver.kv)
    page = driver.kv[seq.pages[0]]
    assert page[-1, :20].isfinite().all() and page[-1, 20:].isnan().all() and page[:-1].isnan().all()


def test_unused_mtp_layer_is_not_loaded(random_bf16: Path, model: DeepseekV3) -> None:
    short = load_model(random_bf16, ParallelDims(), torch.device("cpu"), torch.float32, mtp=False)
    assert short.mtp is None and short.config.num_kv_layers == model.config.num_kv_layers - 1
    tokens = random_prompt(20, model.config.vocab_size, 1)
    outputs = [Driver(one).step([(Seq(tokens), 20)]) for one in (short, model)]
    assert torch.equal(*outputs)
    assert weight_bytes(short.config, ParallelDims(), torch.float32, PLAIN) == tensor_bytes(short)
    assert tensor_bytes(short) < tensor_bytes(model)
