"""The published members of V3's family, reduced: the shape rules of each, logits and greedy tokens against
transformers, from one file or shards, from FP8, and of R1 from INT8.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.fp8 import dequant_blocks, quant_blocks
from millrace_serve.model.checkpoint.export_quantised import QUANTISED, export
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.reference import Reference, random_reference
from millrace_testing.tolerances import MODEL_TOLERANCE, assert_close
from model.harness import Driver, Seq, random_prompt
from torch import Tensor

VOCAB, CPU = 320, torch.device("cpu")
FEW_TOLERANCE = (
    1e-3  # sums in another order make 2e-4, which these sharp random weights magnify; a wrong scale makes 0.1
)
REDUCED: dict[str, Any] = {  # widths and depth; everything else is as published
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "bos_token_id": 0,
    "eos_token_id": None,
}
MLA = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
YARN = {"type": "yarn", "original_max_position_embeddings": 4096, "mscale": 1.0, "mscale_all_dim": 1.0}
V3: dict[str, Any] = {  # V3-0324, R1, V3.1 and V3.1-Terminus have the same
    "model_type": "deepseek_v3",
    "q_lora_rank": 96,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 2,
    "routed_scaling_factor": 2.5,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
    "rope_scaling": {**YARN, "factor": 40, "beta_fast": 32, "beta_slow": 1},
}
MEMBERS: dict[str, dict[str, Any]] = {
    "deepseek-v3": V3,
    "deepseek-v3.2": {  # sparse from 17 tokens on; fewer heads of the indexer would give many keys the same logit 0
        **V3,
        "model_type": "deepseek_v32",
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 16,
    },
    "moonlight": {
        "model_type": "deepseek_v3",
        "q_lora_rank": None,
        "n_routed_experts": 64,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.446,
        "max_position_embeddings": 8192,
        "rope_theta": 50000,
        "rope_scaling": None,
    },
    "kimi-k2": {
        "model_type": "kimi_k2",
        "q_lora_rank": 96,
        "n_routed_experts": 384,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.827,
        "max_position_embeddings": 131072,
        "rope_theta": 50000,
        "rope_scaling": {**YARN, "factor": 32, "beta_fast": 1.0, "beta_slow": 1.0},
    },
}


@dataclass
class Member:
    hf: Reference
    folder: Path  # one file, for V3 in shards

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        return self.hf(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=MEMBERS)
def member(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Member:
    published = {**REDUCED, **MLA, **MEMBERS[request.param], "scoring_func": "sigmoid", "topk_method": "noaux_tc"}
    hf = random_reference({**published, "model_type": published["model_type"].replace("kimi_k2", "deepseek_v3")})
    folder = tmp_path_factory.mktemp(request.param)
    hf.save_pretrained(folder / "bf16", max_shard_size="4MB" if request.param == "deepseek-v3" else "1GB")
    (folder / "bf16" / "config.json").write_text(json.dumps(published))
    return Member(hf, folder / "bf16")


def driver(path: Path, *, keep_quantised: bool = False) -> Driver:
    return Driver(load_model(path, ParallelDims(), CPU, torch.float32, keep_quantised=keep_quantised))


def test_logits_and_greedy_tokens(member: Member) -> None:
    is_v3 = member.hf.config.model_type == "deepseek_v3" and member.hf.config.n_routed_experts == 256
    assert (len(list(member.folder.glob("*.safetensors"))) > 1) is is_v3
    check_answers(driver(member.folder), member.logits)


def check_answers(found: Driver, logits: Callable[[list[int]], Tensor]) -> None:
    """The logits of a prompt and the greedy tokens of three are those of transformers."""
    prompt = random_prompt(130, VOCAB, 130)
    assert_close(found.step([(Seq(prompt), 130)]), logits(prompt), MODEL_TOLERANCE)
    prompts = [random_prompt(n, VOCAB, n) for n in (3, 70, 130)]
    answers = found.greedy(prompts, 16)
    assert len(set(answers[0])) > 4, "worth comparing"
    for prompt, tokens in zip(prompts, answers, strict=True):
        likeliest = logits(prompt + tokens[:-1])[len(prompt) - 1 :].argmax(-1)
        assert len(tokens) == 16 and tokens == likeliest.tolist()


@pytest.mark.parametrize("member", ["deepseek-v3", "moonlight"], indirect=True)
def test_fp8_weights(member: Member, tmp_path: Path) -> None:
    """Products of few tokens run on FP8 weights without more rounding. With and without a LoRA of queries: Kimi K2 has
    the tensors of V3, and test_sparse.py those of V3.2.
    """
    export(member.folder, tmp_path / "fp8")
    assert ModelConfig.load(tmp_path / "fp8").fp8_blocks
    expected = check_quantised(member, tmp_path / "fp8", lambda w: dequant_blocks(*quant_blocks(w), torch.float32))
    few = driver(tmp_path / "fp8", keep_quantised=True).step([(Seq(random_prompt(100, VOCAB, 1)), SMALL_TOKENS)])
    errors = (few - expected[:SMALL_TOKENS]).norm(dim=1) / expected[:SMALL_TOKENS].norm(dim=1)
    assert float(errors.median()) <= FEW_TOLERANCE, "a row or two may choose other experts"


@pytest.mark.parametrize("form", ["int8", "int8-block"])
@pytest.mark.parametrize("member", ["deepseek-v3"], indirect=True)
def test_int8_weights(form: Literal["int8", "int8-block"], member: Member, tmp_path: Path) -> None:
    def rounded(weight: Tensor) -> Tensor:
        out, size = weight.clone(), 128 if form == "int8-block" else max(weight.shape)
        for tile in (tile for rows in out.split(size) for tile in rows.split(size, 1)):
            scale = tile.abs().amax((0, 1) if form == "int8-block" else 1, keepdim=True) / 127
            tile.copy_((tile / scale).round() * scale)
        return out

    export(member.folder, tmp_path / form, form)
    assert ModelConfig.load(tmp_path / form).int8 == form
    check_quantised(member, tmp_path / form, rounded)


def check_quantised(member: Member, folder: Path, rounded: Callable[[Tensor], Tensor]) -> Tensor:
    """The reference has the weights that the form left. The logits of a prompt."""

    def left(name: str, param: Tensor) -> Tensor:
        """transformers keeps the weights of a layer's experts in one tensor."""
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            halves = [part for expert in param for part in expert.chunk(2 if "gate_up" in name else 1)]
            return torch.cat([rounded(half) for half in halves]).view_as(param)
        return rounded(param) if QUANTISED.fullmatch(name) else param

    prompt = random_prompt(100, VOCAB, 1)
    dequantised = driver(folder).step([(Seq(prompt), 100)])
    saved = {name: param.clone() for name, param in member.hf.state_dict().items()}
    try:
        member.hf.load_state_dict({name: left(name, param) for name, param in saved.items()})
        assert_close(dequantised, member.logits(prompt), MODEL_TOLERANCE)
    finally:
        member.hf.load_state_dict(saved)
    return dequantised
