"""The host tier with the tiny model: the same tokens as an engine with room for everything, canaries on."""

import random
from typing import Any

from engine.drafting import rank_of
from engine.harness import said
from millrace_serve.engine.config import GIB, EngineConfig
from millrace_serve.engine.core import Grammar, GrammarKind, Request, RequestId, SamplingParams
from millrace_serve.engine.engine import Engine

SCHEMA = Grammar(GrammarKind.REGEX, "[ab ]{30,45}")
SAMPLING = (
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.9, "seed": 11, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.0, "grammar": SCHEMA},
)


def make(**config: Any) -> Engine:
    base = {"num_pages": 64, "max_model_len": 256, "max_running": 16, "max_prefill_tokens": 96, "page_size": 16}
    limits = EngineConfig.model_validate({**base, "checks": ("canary", "poison"), **config})
    return rank_of(limits).engine()


def run(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    """Every token of each prompt, whose sampling is taken from the list above in turn."""
    asked = []
    for room, prompt in enumerate(prompts):
        wants = SAMPLING[room % len(SAMPLING)]
        params = SamplingParams(max_tokens=40, ignore_eos="grammar" not in wants, **wants)  # type: ignore[arg-type]
        asked.append(Request(id=RequestId(room, 0), token_ids=prompt, sampling=params))
    answers = said(engine, asked, close=False)
    return [[token for token, _ in answers[room]] for room in range(len(prompts))]


def test_preemption_with_drafts_changes_no_token() -> None:
    rng = random.Random(7)
    prompts = [[rng.randrange(16, 1000) for _ in range(44 + 3 * room)] for room in range(len(SAMPLING))]
    roomy = make(draft_tokens=2)
    expected = run(roomy, prompts)
    assert roomy.load().counters["preemptions"] == 0
    host_cache_gib = 64 * roomy.pool.layout.page_bytes / GIB
    # 6 pages for each in the end: two are too many, also where the one with a grammar, which is compiled first, is late
    tight = make(draft_tokens=2, num_pages=9, host_cache_gib=host_cache_gib)
    assert run(tight, prompts) == expected
    load = tight.load()
    assert load.counters["preemptions"] == load.counters["resumed"] > 0 and load.counters["host_bytes/load"] > 0
    for engine in (roomy, tight):
        engine.close()
