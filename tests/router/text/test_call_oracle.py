"""Well-formed calls of DeepSeek V3.2 as DeepSeek's own parser reads them.

It serves V4, which keeps V3.2's markup and also reads its list mark. It passes malformed calls on, so those are no
question for it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace_router.text.chat_format import Style
from router.text.test_call_properties import call_lists, pieces_of
from router.text.test_parsers import OFFER, parse, v32

recipe = pytest.importorskip("deepseek_recipe", reason="has no wheel for this machine")
MODEL = "DeepSeek-V4-Pro"


def oracle(pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """(text, calls)"""
    tools = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in OFFER.names]
    request = {"model": MODEL, "messages": [{"role": "user", "content": "?"}], "tools": tools}
    asked = recipe.ChatCompletionRequest(request).convert(recipe.ConversionOptions())
    generator = recipe.ChatCompletionRequest.chunk_generator(asked, "a", MODEL)
    processor = recipe.StreamProcessor(generator, recipe.ParsingOptions())
    answer = recipe.ChatCompletionResponse("a", MODEL, 0, 0, 0)
    inputs = [recipe.InferenceChunk.text(piece, 1) for piece in pieces]
    for each in (*inputs, recipe.InferenceChunk.finish(recipe.InferenceFinishReason.Stop)):
        for chunk in processor.push(each):
            answer.accumulate(chunk)
    for chunk in processor.finish():
        answer.accumulate(chunk)
    message: dict[str, Any] = json.loads(answer.to_json())["choices"][0]["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return message["content"] or "", [(call["name"], call["arguments"]) for call in calls]


@settings(max_examples=200, deadline=None)
@given(calls=call_lists, cuts=st.lists(st.integers(0, 400), max_size=9))
def test_calls_are_read_as_deepseek_reads_them(calls: list[tuple[str, dict[str, Any]]], cuts: list[int]) -> None:
    pieces = pieces_of("I look." + v32(*((name, json.dumps(arguments)) for name, arguments in calls)), cuts)
    _, text, read = parse(pieces, Style.V32)
    assert oracle([piece for piece in pieces if piece]) == (text, read)
