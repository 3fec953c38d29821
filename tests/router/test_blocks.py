"""Blocks begin, grow and end one after the other, however the text was cut, and nothing is lost on the way."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from millrace_router.apis.blocks import ContentBlocks, Kind, Step
from millrace_router.text import markers
from millrace_router.text.call_stream import CallDelta
from millrace_router.text.chat_format import ChatFormat, Style
from millrace_router.text.message import MessageParser, Said
from router.test_parsers import CERTAIN, WEATHER, v31

PARTS = [
    *("So.", markers.THINK_END, "Hello ", "\n"),
    *(v31(("weather", WEATHER)), v31(("time", ""), ("time", "{}")), *markers.DEEPSEEK),
]  # fmt: skip


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from(PARTS), max_size=8), st.data())
def test_nothing_is_lost_however_the_text_is_cut(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)) | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)] or [""]
    parser, blocks, told, open_ = parser_of(), ContentBlocks(), {}, None
    for i, piece in enumerate(pieces):
        for step, block, new in blocks.push(parser.push(piece, last=i + 1 == len(pieces)), last=i + 1 == len(pieces)):
            if step is Step.BEGIN:
                assert open_ is None and block.index == len(told) and not new
                open_, told[block.index] = block, ""
            else:
                assert block is open_
                told[block.index] += new
            if step is Step.END:
                open_ = None
    assert open_ is None and [block.text for block in blocks.all] == list(told.values())
    whole = parser_of().push(text, last=True)
    for kind, said in ((Kind.THOUGHTS, whole.thoughts), (Kind.TEXT, whole.text)):
        assert "".join(block.text for block in blocks.all if block.kind is kind) == said
    calls = [(block.name, block.text) for block in blocks.all if block.kind is Kind.CALL]
    assert calls == [(call.name, call.arguments) for call in whole.calls]
    assert len({block.id for block in blocks.all if block.kind is Kind.CALL}) == len(calls)


def parser_of() -> MessageParser:
    return MessageParser(ChatFormat(Style.V31, reasons=True), thinking=True, offer=CERTAIN)


def test_the_rest_of_a_call_stands_before_the_text_behind_it() -> None:
    blocks = ContentBlocks()
    list(blocks.push(Said.of("", [CallDelta(0, "f", "{")]), last=False))
    list(blocks.push(Said.of("", [CallDelta(0, "", "}"), "Done.", CallDelta(1, "g", "{}")]), last=True))
    assert [(block.kind, block.name, block.text) for block in blocks.all] == [
        (Kind.CALL, "f", "{}"), (Kind.TEXT, "", "Done."), (Kind.CALL, "g", "{}"),
    ]  # fmt: skip
