"""Parts of answers: log-probabilities of any tokens, blocks of content and calls, and events."""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from millrace.v1 import common_pb2
from millrace.v1.inference_pb2 import Usage
from millrace_router.apis.blocks import ContentBlocks, Kind, Step
from millrace_router.apis.openai.answers import AnswerShape
from millrace_router.flow.inference import Answer
from millrace_router.flow.stream import AnswerText, Delta
from millrace_router.http.answers import event
from millrace_router.text import markers
from millrace_router.text.call_stream import CallDelta
from millrace_router.text.chat_format import ChatFormat, Style
from millrace_router.text.markers import THINK_END
from millrace_router.text.message import MessageParser, ParsedOutput
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing import paths
from millrace_testing.examples import examples
from router.harness import BOS, write_tokenizer
from router.text.test_parsers import CERTAIN, WEATHER, v31

TEXTS = st.text(st.sampled_from("ab é日本🚀👨‍👩‍👧 h\u0301\n"), max_size=6)
FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> list[Tokenizer]:
    """Of bytes, in which every character but ASCII is several tokens, and the tiny model's."""
    folder = write_tokenizer(tmp_path_factory.mktemp("bytes"), markers=(THINK_END,))
    return [Tokenizer.load(folder), Tokenizer.load(paths.TINY)]


def entry(tokenizer: Tokenizer, token: int, others: Sequence[int]) -> common_pb2.TokenLogprobs:
    def of(i: int) -> common_pb2.TokenLogprob:
        return common_pb2.TokenLogprob(token_id=i, logprob=-float(i))

    return common_pb2.TokenLogprobs(sampled=of(token), top=[of(i) for i in others])


def deltas(tokenizer: Tokenizer, pieces: list[list[int]], tops: list[list[int]], stops: list[str], keep: bool) -> list:
    """As they come for these outputs."""
    text = AnswerText(tokenizer, MessageParser.of_plain_text(), stops, keep_special=keep)
    made, count, tops = [], 0, [*tops]
    for i, piece in enumerate([*pieces, []]):
        said, used = text.push(piece)
        ended = text.stopped or i == len(pieces)
        if ended and not text.stopped:
            said.text += text.flush().text
        count += used
        entries = [entry(tokenizer, token, tops.pop(0)) for token in piece[:used]]
        made.append(Delta(0, said, piece[:used], entries, int(ended), count, 0, Usage(), i == 0))
        if ended:
            break
    return made


def told(tokenizer: Tokenizer, made: list[Delta], chat: bool, keep: bool, stream: bool) -> tuple[str, dict[str, Any]]:
    """The text and the log-probabilities of an answer."""
    shape = AnswerShape(chat, Answer("", "", 1, False, None), tokenizer, True, keep)  # type: ignore[arg-type]
    if not stream:
        (choice,) = shape.whole(made)["choices"]
        return (choice["message"]["content"] if chat else choice["text"]), choice["logprobs"]
    parts = [shape._part(delta, whole=False) for delta in made]
    text = "".join(part["delta"].get("content", "") if chat else part["text"] for part in parts)
    names = ("content",) if chat else FIELDS
    joined = {name: list(itertools.chain.from_iterable(part["logprobs"][name] for part in parts)) for name in names}
    return text, joined


@st.composite
def outputs(draw: st.DrawFn, of: Tokenizer) -> tuple[list[int], list[list[int]], list[list[int]]]:
    """(ids, as pieces, alternatives of each): texts, random ids, special ones and ids beyond the vocabulary."""
    size = len(of._bytes)
    some = st.integers(0, size + 2)
    ids = draw(st.lists(TEXTS.map(lambda text: of._encode(text, add_bos=False)) | some.map(lambda i: [i]), max_size=6))
    ids = list(itertools.chain.from_iterable(ids))
    cuts = [0, *sorted(draw(st.lists(st.integers(0, len(ids)), max_size=4))), len(ids)]
    tops = [draw(st.lists(some, max_size=3, unique=True)) for _ in ids]
    return ids, [ids[a:b] for a, b in itertools.pairwise(cuts)], tops


@examples(40)
@given(data=st.data(), keep=st.booleans(), stops=st.sampled_from([[], ["b"], ["本"], ["é", "🚀\n"], ["\ufffd"]]))
def test_of_plain_text(data: st.DataObject, keep: bool, stops: list[str], tokenizers: list[Tokenizer]) -> None:
    tokenizer = data.draw(st.sampled_from(tokenizers))
    ids, pieces, tops = data.draw(outputs(tokenizer))
    made = deltas(tokenizer, pieces, tops, stops, keep)
    text, logprobs = told(tokenizer, made, chat=False, keep=keep, stream=False)
    assert told(tokenizer, made, chat=False, keep=keep, stream=True) == (text, logprobs)
    uncut = tokenizer.decode(ids, keep)
    assert uncut.startswith(text)
    tokens, offsets = logprobs["tokens"], logprobs["text_offset"]
    assert len(tokens) == len(offsets) == made[-1].completion_tokens and offsets == sorted(offsets)
    assert not offsets or offsets[0] == 0
    for i, token, at, top in zip(ids, tokens, offsets, logprobs["top_logprobs"], strict=False):
        whole, shown = tokenizer.token_bytes((i,)), tokenizer.token_bytes((i,), keep)
        assert at <= len(uncut)
        if not token.startswith(("bytes:", "token_id:")):
            assert token.encode() == whole and (not shown or uncut[at:].startswith(token))
        elif token.startswith("bytes:"):
            assert token.removeprefix("bytes:").encode().decode("unicode_escape").encode("latin-1") == whole
            assert not shown or at < len(uncut)
        assert top[token] == -float(i)
    for i, others, top in zip(ids, tops, logprobs["top_logprobs"], strict=False):
        assert sorted(top.values()) == sorted(-float(other) for other in {i, *others}), "one for each token"


@examples(30)
@given(data=st.data(), keep=st.booleans())
def test_bytes_of_a_chat_are_those_of_its_text(data: st.DataObject, keep: bool, tokenizers: list[Tokenizer]) -> None:
    tokenizer = data.draw(st.sampled_from(tokenizers))
    ids, pieces, tops = data.draw(outputs(tokenizer))
    made = deltas(tokenizer, pieces, tops, [], keep)
    _, logprobs = told(tokenizer, made, chat=True, keep=keep, stream=False)
    assert told(tokenizer, made, chat=True, keep=keep, stream=True)[1]["content"] == logprobs["content"]
    joined = b"".join(bytes(token["bytes"]) for token in logprobs["content"])
    assert joined.decode("utf-8", "replace") == tokenizer.decode(ids, keep)
    for i, token, others in zip(ids, logprobs["content"], tops, strict=True):
        assert [top["logprob"] for top in token["top_logprobs"]] == [-float(other) for other in others]
        assert "\ufffd" not in token["token"] or tokenizer.token_bytes((i,)).decode() == token["token"]


def test_parts_of_characters(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path))
    encode = tokenizer._encode
    ids = [*encode("aé", add_bos=False), tokenizer.bos, *encode("🚀b", add_bos=False), 999]
    rocket = encode("🚀", add_bos=False)
    made = deltas(tokenizer, [ids], [[*rocket, 998, 999]] * len(ids), [], keep=False)
    text, logprobs = told(tokenizer, made, chat=False, keep=False, stream=False)
    assert text == "aé🚀b"
    parts = ["bytes:\\xf0", "bytes:\\x9f", "bytes:\\x9a", "bytes:\\x80"]
    assert logprobs["tokens"] == ["a", "bytes:\\xc3", "bytes:\\xa9", BOS, *parts, "b", "token_id:999"]
    assert logprobs["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 2, 3, 4]
    assert list(logprobs["top_logprobs"][0]) == ["a", *parts, "token_id:998", "token_id:999"]
    _, logprobs = told(tokenizer, made, chat=True, keep=False, stream=False)
    assert [token["token"] for token in logprobs["content"]][1:5] == ["\\xc3", "\\xa9", BOS, "\\xf0"]
    assert [token["bytes"] for token in logprobs["content"]][1:5] == [[0xC3], [0xA9], [], [0xF0]]


# ------------------------------------------------------------------------------------- blocks


PARTS = [
    *("So.", markers.THINK_END, "Hello ", "\n"),
    *(v31(("weather", WEATHER)), v31(("time", ""), ("time", "{}")), *markers.DEEPSEEK),
]  # fmt: skip


@examples(40, suppress_health_check=[HealthCheck.too_slow])
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
    for kind, said in ((Kind.REASONING, whole.reasoning), (Kind.TEXT, whole.text)):
        assert "".join(block.text for block in blocks.all if block.kind is kind) == said
    calls = [(block.name, block.text) for block in blocks.all if block.kind is Kind.CALL]
    assert calls == [(call.name, call.arguments) for call in whole.calls]
    assert len({block.id for block in blocks.all if block.kind is Kind.CALL}) == len(calls)


def parser_of() -> MessageParser:
    return MessageParser(ChatFormat(Style.V31, reasons=True), thinking=True, offer=CERTAIN)


def test_the_rest_of_a_call_stands_before_the_text_behind_it() -> None:
    blocks = ContentBlocks()
    list(blocks.push(ParsedOutput.of("", [CallDelta(0, "f", "{")]), last=False))
    list(blocks.push(ParsedOutput.of("", [CallDelta(0, "", "}"), "Done.", CallDelta(1, "g", "{}")]), last=True))
    assert [(block.kind, block.name, block.text) for block in blocks.all] == [
        (Kind.CALL, "f", "{}"), (Kind.TEXT, "", "Done."), (Kind.CALL, "g", "{}"),
    ]  # fmt: skip


# ------------------------------------------------------------------------------------- events


BREAKS = [line[-1] for line in "".join(map(chr, range(sys.maxunicode))).splitlines(keepends=True)[:-1]]


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
    told = data(shape.push(Delta(0, ParsedOutput("", text), [5], [], 0, 1, 0, Usage(), True)))
    assert isinstance(told, dict)
    (choice,) = told["choices"]
    assert (choice["delta"]["content"] if chat else choice["text"]) == text and told["model"] == "".join(BREAKS)


@pytest.mark.parametrize("first", [False, True])
def test_a_call_ends_in_a_chunk_behind_it(first: bool) -> None:
    """A busy machine has all of an answer at once; OpenAI's client tells the end of a call by the next chunk."""
    answer = Answer("", "m", 1, False, None)  # type: ignore[arg-type]
    shape = AnswerShape(True, answer, Tokenizer.load(paths.TINY), False)
    stop = common_pb2.FINISH_REASON_STOP
    told = shape.push(Delta(0, ParsedOutput.of("", [CallDelta(0, "f", "{}")]), [5], [], stop, 1, 0, Usage(), first))
    called, ended = (json.loads(one.removeprefix("data: "))["choices"][0] for one in told.decode().split("\n\n")[:-1])
    assert called["delta"]["tool_calls"] and called["finish_reason"] is None
    assert ended["delta"] == {} and ended["finish_reason"] in ("stop", "tool_calls")
