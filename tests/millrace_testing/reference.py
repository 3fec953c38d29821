"""What transformers makes of models/tiny: greedy tokens and their probabilities. Not for ranks: its import takes 4 s.

A trained model says the same after many a prompt: with one of 3,000 random tokens changed, the next 12 tokens stayed as
they were in 16 of 16 trials. A log-probability moved by 1.3e-3 or more in all of them, so those are compared too.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DeepseekV32Config, DeepseekV32ForCausalLM

from millrace_testing.paths import TINY
from millrace_testing.tolerances import LOGPROB_TOLERANCE

Reference = DeepseekV3ForCausalLM | DeepseekV32ForCausalLM


@dataclass(frozen=True, slots=True)
class Continuation:
    tokens: list[int]
    logprobs: list[float]  # natural, of the tokens

    def begins_with(self, tokens: list[int], logprobs: list[float]) -> bool:
        return tokens == self.tokens[: len(tokens)] and logprobs == _rounded(self.logprobs[: len(tokens)])


def assert_same(found: Sequence[Continuation], expected: Sequence[Continuation]) -> None:
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs == _rounded(other.logprobs)


def assert_greedy(found: Sequence[Continuation], prompts: Sequence[list[int]]) -> None:
    """Each is its prompt's continuation by transformers: behind those before it every token is the likeliest one."""
    expected = [_likeliest(tuple(p), tuple(one.tokens)) for p, one in zip(prompts, found, strict=True)]
    assert_same(found, expected)


def load() -> DeepseekV3ForCausalLM:
    return DeepseekV3ForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()


def greedy(prompts: Sequence[list[int]], num_tokens: int) -> list[Continuation]:
    """The next `num_tokens` tokens, past any end of sequence, one prompt at a time in FP32."""
    model = load()
    model.generation_config.eos_token_id = None
    return [_continue(model, prompt, num_tokens) for prompt in prompts]


def _rounded(logprobs: list[float]) -> object:
    return pytest.approx(logprobs, abs=LOGPROB_TOLERANCE, rel=0)


@cache
def _likeliest(prompt: tuple[int, ...], tokens: tuple[int, ...]) -> Continuation:
    """The reference's choice behind the prompt and each of the tokens but the last one, in one pass."""
    with torch.inference_mode():
        logits = _loaded()(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
    best = logits.log_softmax(-1).max(-1)
    return Continuation(best.indices.tolist(), best.values.tolist())


_loaded = cache(load)


def _continue(model: DeepseekV3ForCausalLM, prompt: list[int], num_tokens: int) -> Continuation:
    ids = torch.tensor([prompt])
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num_tokens,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    tokens = out.sequences[0, len(prompt) :]
    logprobs = torch.cat(out.logits).log_softmax(-1)[torch.arange(num_tokens), tokens]
    return Continuation(tokens.tolist(), logprobs.tolist())


def random_reference(config: dict[str, Any]) -> Reference:
    """With random weights: transformers' own initialisation is too small to tell tokens apart."""
    torch.manual_seed(1)
    sparse = config.get("model_type") == "deepseek_v32"
    model, parsed = (DeepseekV32ForCausalLM, DeepseekV32Config) if sparse else (DeepseekV3ForCausalLM, DeepseekV3Config)
    hf = model(parsed(**config)).eval()
    with torch.no_grad():
        for name, param in hf.named_parameters():
            if param.dim() > 1:
                param.normal_(std=(4.0 if name.startswith("lm_head") else 1.2) * param.shape[-1] ** -0.5)
            else:
                param.normal_(mean=1.0, std=0.1)
        for name, buffer in hf.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.05)
    return hf
