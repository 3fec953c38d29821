"""Logits and greedy tokens against transformers' DeepseekV3ForCausalLM, FP32, from checkpoints that it wrote."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from millrace_serve.model.attn_step import FormThresholds
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.reference import random_reference
from millrace_testing.tolerances import MODEL_TOLERANCE, assert_close
from model.harness import Driver, Seq, random_prompt
from torch import Tensor
from transformers import DeepseekV3ForCausalLM

VOCAB = 320
ALWAYS_ABSORB, ALWAYS_EXPAND = FormThresholds(1 << 30, 128), FormThresholds(0, 128)

BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 96,
    "intermediate_size": 128,
    "moe_intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 80,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 2048,
    "num_nextn_predict_layers": 0,
    "bos_token_id": 0,
    "eos_token_id": None,
}


def yarn(factor: float, mscale: float, mscale_all_dim: float, **more: Any) -> dict[str, Any]:
    scaling = {"type": "yarn", "factor": factor, "mscale": mscale, "mscale_all_dim": mscale_all_dim, **more}
    return {"rope_scaling": {"original_max_position_embeddings": 128, "beta_fast": 32, "beta_slow": 1, **scaling}}


CONFIGS: dict[str, dict[str, Any]] = {
    "v3": {**BASE, **yarn(16, 1.0, 1.0)},
    "no-q-lora": {**BASE, "q_lora_rank": None, "first_k_dense_replace": 0, "n_group": 1, "topk_group": 1},
    "yarn-mscale": {
        **BASE,
        **yarn(40, 0.707, 1.0, beta_fast=16, beta_slow=2),
        "n_group": 8,
        "topk_group": 3,
        "num_experts_per_tok": 6,
        "n_shared_experts": 2,
        "norm_topk_prob": False,
    },
    "narrow-heads": {
        **BASE,
        "first_k_dense_replace": 0,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 32,
        "v_head_dim": 48,
        "n_group": 2,
        "topk_group": 1,
        "rope_theta": 50000.0,
        "routed_scaling_factor": 1.0,
    },
}


@dataclass
class Case:
    hf: DeepseekV3ForCausalLM
    path: Path

    def load(self, thresholds: FormThresholds | None = None) -> DeepseekV3:
        return load_model(self.path, ParallelDims(), torch.device("cpu"), torch.float32, thresholds)

    @torch.no_grad()
    def logits(self, tokens: list[int]) -> Tensor:
        return self.hf(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=CONFIGS, ids=list(CONFIGS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    hf = random_reference(CONFIGS[request.param])
    path = tmp_path_factory.mktemp(request.param)
    hf.save_pretrained(path)
    yield Case(hf, path)


@pytest.mark.parametrize("thresholds", [ALWAYS_ABSORB, ALWAYS_EXPAND], ids=["absorb", "expand"])
def test_chunked_prefill_and_decode_logits(case: Case, thresholds: FormThresholds) -> None:
    prompt = random_prompt(150, VOCAB, 2)
    driver, seq = Driver(case.load(thresholds)), Seq(prompt)
    logits = [driver.step([(seq, num)]) for num in (37, 1, 40, 2, 64, 1, 1, 4)]
    assert_close(torch.cat(logits), case.logits(prompt), MODEL_TOLERANCE)


@pytest.mark.parametrize("thresholds", [ALWAYS_ABSORB, ALWAYS_EXPAND], ids=["absorb", "expand"])
def test_cached_prefix_shared_by_two_sequences(case: Case, thresholds: FormThresholds) -> None:
    prefix = random_prompt(128, VOCAB, 3)
    driver, first = Driver(case.load(thresholds)), Seq(prefix + random_prompt(30, VOCAB, 4))
    driver.step([(first, 158)])
    others = [Seq(prefix + random_prompt(n, VOCAB, n), first.pages[:2], computed=128) for n in (1, 70)]
    for other in others:
        num = len(other.tokens) - 128
        expected = case.logits(other.tokens)[128:]
        assert_close(driver.step([(other, num)]), expected, MODEL_TOLERANCE)


def test_mixed_batch_logits(case: Case) -> None:
    """Decoding sequences, a fresh prompt and chunks with prefixes of different lengths in one step."""
    lens, steps = (20, 129, 65, 90, 150), ((19, 128, 0, 40, 100), (1, 1, 65, 50, 50))
    seqs = [Seq(random_prompt(n, VOCAB, n)) for n in lens]
    driver = Driver(case.load())
    for seq, num in zip(seqs, steps[0], strict=True):
        if num:
            driver.step([(seq, num)])
    logits = driver.step(list(zip(seqs, steps[1], strict=True)), padding=3)
    expected = [case.logits(seq.tokens)[-num:] for seq, num in zip(seqs, steps[1], strict=True)]
    assert_close(logits, torch.cat(expected), MODEL_TOLERANCE)


def test_greedy_tokens(case: Case) -> None:
    prompts = [random_prompt(n, VOCAB, n) for n in (1, 2, 64, 65, 150)]
    found = Driver(case.load()).greedy(prompts, 24)  # whole prompts at once
    assert len({tuple(tokens) for tokens in found}) == len(prompts) and len(set(found[0])) > 10  # worth comparing
    for prompt, tokens in zip(prompts, found, strict=True):
        likeliest = case.logits(prompt + tokens[:-1])[len(prompt) - 1 :].argmax(-1)
        assert len(tokens) == 24 and tokens == likeliest.tolist()
    assert Driver(case.load(), seed=1).greedy(prompts, 24, chunk=48) == found  # chunks beside decodes
