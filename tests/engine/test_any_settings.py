"""No combination of settings changes an answer: drawn at random, over the trained model in FP32."""

import functools
from typing import Any

import pytest
import torch
from engine.harness import request, said
from hypothesis import given
from hypothesis import strategies as st
from millrace_serve.engine.config import EngineConfig, Execution, Role
from millrace_serve.engine.core import Request
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.attn_step import FORMS, FormThresholds
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.examples import examples
from millrace_testing.paths import TINY

CPU = torch.device("cpu")
LENGTHS = (1, 5, 16, 17, 63, 64, 65, 130, 20, 190)
SAMPLED: dict[str, object] = {"temperature": 0.9, "seed": 3, "repetition_penalty": 1.2}
LIMITS: dict[str, object] = {"num_pages": 2000, "max_model_len": 256, "checks": ("canary", "poison")}
Answers = dict[int, list[int]]


@functools.cache
def model(mtp: bool) -> DeepseekV3:
    return load_model(TINY, ParallelDims(), CPU, torch.float32, mtp=mtp)


def asked(lengths: tuple[int, ...]) -> list[Request]:
    """Greedy and sampled; all of them twice, so that pages are cached or in the host's memory the second time."""
    prompts = [[10 + (7 * i + n) % 500 for i in range(n)] for n in lengths] * 2
    how = ({"temperature": 0.0}, SAMPLED)
    return [request(room, prompt, max_tokens=3 + room % 9, **how[room % 2]) for room, prompt in enumerate(prompts)]


def answers(
    limits: dict[str, object], execution: dict[str, object], form: str = "", lengths: tuple[int, ...] = LENGTHS
) -> Answers:
    """`form`: of attention to cached tokens, of a prompt in several chunks too."""
    config, options = EngineConfig.model_validate(LIMITS | limits), Execution.model_validate(execution)
    own = model(bool(config.draft_tokens))
    own.thresholds = FORMS.get(form) or FormThresholds.measured(CPU, own.config.num_attention_heads)
    rank = load_rank(config, Role.UNIFIED, TINY, ParallelDims(), CPU, torch.float32, execution=options, model=own)
    engine, batch = rank.engine(), asked(lengths)
    found = said(engine, batch[: len(lengths)], close=False) | said(engine, batch[len(lengths) :])
    return {room: [token for token, _ in tokens] for room, tokens in found.items()}


@functools.cache
def plain(lengths: tuple[int, ...] = LENGTHS) -> Answers:
    """One sequence after the other, each prompt in one step, nothing cached, nothing ahead of time."""
    return answers({"max_running": 1, "overlap": False, "prefix_cache": False}, {}, lengths=lengths)


@st.composite
def drawn(draw: Any) -> tuple[dict[str, object], dict[str, object], str]:
    """The arguments of `answers`."""
    running, page_size = draw(st.integers(1, 12)), draw(st.sampled_from((2, 16, 64)))
    limits: dict[str, object] = {
        "max_running": running,
        "max_prefill_tokens": draw(st.sampled_from((17, 40, 64, 100, 256, 2048))),
        "page_size": page_size,
        "draft_tokens": draw(st.sampled_from((0, 0, 1, 3))),
        "overlap": draw(st.booleans()),
        "prefix_cache": draw(st.booleans()),
    }
    if limits["prefix_cache"] and draw(st.booleans()):
        pages = 2 * 256 // page_size + 2
        limits |= {"num_pages": pages, "max_running": min(running, 2), "host_cache_gib": 0.05}
    execution: dict[str, object] = {}
    if draw(st.booleans()):
        tokens = draw(st.sampled_from((0, 16, 48, 200)))
        buckets = draw(st.sampled_from(((), (1,), (1, 4, 5))))
        execution = {"graphs": buckets or "on", "chunk_graph_tokens": tokens}
    return limits, execution, draw(st.sampled_from(("", *FORMS)))


@pytest.mark.long
@examples(10)
@given(drawn())
def test_no_setting_changes_an_answer(found: tuple[dict[str, object], dict[str, object], str]) -> None:
    assert answers(*found) == plain()


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_of_drafts_behind_the_last_page_read_no_former_owners_page(page_size: int) -> None:
    """Without the prefix cache pages are poisoned when a sequence ends. Drafts may be longer than a page."""
    limits = {"page_size": page_size, "draft_tokens": 3, "prefix_cache": False, "max_running": 1}
    lengths = (40, 16, 5)
    assert answers(limits, {}, lengths=lengths) == plain(lengths)
