"""A server-sent event has one line of data, also for clients whose lines end at every line break of Unicode."""

from __future__ import annotations

import json
import sys

import pytest
from millrace_router.apis.openai.answers import AnswerShape
from millrace_router.flow.inference import Answer
from millrace_router.flow.stream import Delta
from millrace_router.http.answers import event
from millrace_router.text.message import Said
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing import paths

BREAKS = [c for c in map(chr, range(sys.maxunicode)) if len(f"a{c}b".splitlines()) > 1]


def data(told: bytes) -> object:
    (line,) = [line for line in told.decode().splitlines() if line]
    return json.loads(line.removeprefix("data: "))


def test_an_event_has_one_line_of_data() -> None:
    value = {"text": "".join(f"é{c}" for c in BREAKS), **dict.fromkeys(BREAKS, "a")}
    assert len(BREAKS) > 8 and data(event(value)) == value


@pytest.mark.parametrize("chat", [False, True])
def test_a_chunk_has_one_line_of_data(chat: bool) -> None:
    answer = Answer("", "".join(BREAKS), 1, False, None)  # type: ignore[arg-type]
    shape, text = AnswerShape(chat, answer, Tokenizer.load(paths.TINY), False), "x".join(BREAKS)
    told = data(shape.push(Delta(0, Said("", text), [5], [], 0, 1, 0, 0, 0, True)))
    assert isinstance(told, dict)
    (choice,) = told["choices"]
    assert (choice["delta"]["content"] if chat else choice["text"]) == text and told["model"] == "".join(BREAKS)
