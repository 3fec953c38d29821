"""What holds for all outputs: the cuts do not matter, finished calls have an object, and nothing readable is lost."""

import itertools
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from millrace_router.apis.openai.chat import Conversation
from millrace_router.text import dsml
from millrace_router.text.call_arguments import may_become_object
from millrace_router.text.chat_format import Style
from millrace_router.text.client_text import GUARD
from millrace_router.text.markers import ALL, DEEPSEEK, DSML, KIMI, THINK, THINK_END
from millrace_router.text.tokenizer import Tokenizer
from millrace_testing.examples import examples
from router.harness import EOS, write_tokenizer
from router.text.test_parsers import (
    CALL,
    CALL_SEP,
    CALLS,
    CERTAIN,
    CITY,
    FORMS,
    INVOKE,
    OFFER,
    TIME,
    WEATHER,
    parse,
    v32,
)

from router import templates

alphabet = st.sampled_from(
    [
        *(*ALL, *(marker[:4] for marker in ALL), "function", "name", "functions.name:0", "\n", "```", "`", "```json"),
        *(" ", "{}", '{"a": 1}', "x", "x", dsml.CALLS, dsml.CALLS_END, dsml.CALL, dsml.CALL_END, dsml.PARAMETER),
        *(dsml.PARAMETER_END, ' name="a" string="false">', ' name="b" string="true">', ' name="name">'),
        *(">", '"', "{", "}"),
    ]
)  # fmt: skip
BEGINNINGS = [
    ("", Style.V31),
    (f"{CALLS}{CALL}", Style.V31),
    (f"{CALLS}{CALL}name{CALL_SEP}" + '{"a": "', Style.V31),
    (f"{CALLS}{CALL}function{CALL_SEP}name\n```json\n", Style.V3),
    (f"{KIMI.calls}{KIMI.call}", Style.KIMI),
    (f"{KIMI.calls}{KIMI.call}functions.name:0{KIMI.sep}", Style.KIMI),
    (f"{dsml.CALLS}{INVOKE}", Style.V32),
    (f"{dsml.CALLS}{INVOKE}{CITY}", Style.V32),
]


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    return [text[a:b] for a, b in itertools.pairwise([0, *sorted(min(cut, len(text)) for cut in cuts), len(text)])]


@examples(100)
@given(parts=st.lists(alphabet, max_size=24), cuts=st.lists(st.integers(0, 400), max_size=40), data=st.data())
def test_the_pieces_do_not_matter(parts: list[str], cuts: list[int], data: st.DataObject) -> None:
    begin, style = data.draw(st.sampled_from(BEGINNINGS))
    text = begin + "".join(parts)
    fields = {"thinking": data.draw(st.booleans()), "offer": data.draw(st.sampled_from([OFFER, CERTAIN]))}
    fields["cut"] = data.draw(st.booleans())
    expected = parse([text], style, **fields)
    assert parse(pieces_of(text, cuts), style, **fields) == expected
    assert parse(list(text), style, **fields) == expected
    reasoning, shown, calls = expected
    assert {name for name, _ in calls} <= {*OFFER.names}
    if fields["offer"] is OFFER:
        for i, (_, arguments) in enumerate(calls):
            finished = not fields["cut"] or i + 1 < len(calls)
            assert isinstance(json.loads(arguments), dict) if finished else may_become_object(arguments)
    if "```" not in text:  # a code block's language is dropped
        kept = [reasoning, shown, *itertools.chain.from_iterable(calls)]
        assert sum(part.count("x") for part in kept) == text.count("x"), "nothing that the model wrote is lost"


@pytest.mark.parametrize("offer", [OFFER, CERTAIN])
@pytest.mark.parametrize("style", Style)
def test_an_output_may_be_cut_anywhere(style: Style, offer: Any) -> None:
    """By `max_tokens`, or by a stop string."""
    before, form = f"{THINK}I ask.{THINK_END}I look.", FORMS[style]
    whole = before + form(("weather", WEATHER), ("time", "{}"), ("time", TIME)) + "Done."
    *_, called = parse([whole], style, offer=offer)
    assert [name for name, _ in called] == ["weather", "time", "time"]
    for at in range(len(whole)):
        said = parse([whole[:at]], style, offer=offer, cut=True)
        reasoning, text, calls = said
        assert at % 5 or parse(list(whole[:at]), style, offer=offer, cut=True) == said
        assert f"I ask.{THINK_END}".startswith(reasoning.removeprefix(THINK)) and len(calls) <= len(called)
        assert calls[:-1] == called[: len(calls[:-1])], "finished ones"
        if calls:
            name, arguments = calls[-1]
            assert name == called[len(calls) - 1][0] and may_become_object(arguments)
            assert called[len(calls) - 1][1].startswith(arguments) and "I look." in text
        if offer is OFFER:
            *_, calls = parse([whole[:at]], style)  # a stop string
            assert calls == called[: len(calls)], "no call is guessed"


values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("aZ \n\"'\\`ü☂<>{}:,"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc ü", max_size=3), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
call_lists = st.lists(
    st.tuples(st.sampled_from(OFFER.names), st.dictionaries(st.text("abc_ü>", min_size=1), values, max_size=4)),
    min_size=1,
    max_size=4,
)
RENDERED = {
    "V3_0324": (Style.V3, templates.V3_0324, DEEPSEEK),
    "R1_0528": (Style.V3, templates.R1_0528, DEEPSEEK),
    "V31": (Style.V31, templates.V31, DEEPSEEK),
    "V32": (Style.V32, None, (*DEEPSEEK, DSML)),
    "KIMI_K2": (Style.KIMI, templates.KIMI_K2, KIMI),
    "KIMI_THINKING": (Style.KIMI, templates.KIMI_THINKING, KIMI),
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    def load(name: str) -> Tokenizer:
        _, template, marks = RENDERED[name]
        folder: Path = tmp_path_factory.mktemp(name.lower())
        return Tokenizer.load(write_tokenizer(folder, template, (THINK, THINK_END, *marks)))

    return {name: load(name) for name in RENDERED}


def rendered(tokenizer: Tokenizer, calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What the model is shown of its own calls, up to the end of its turn."""
    made = [
        {"id": f"functions.{name}:{i}", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    messages = [{"role": "user", "content": "☀"}, {"role": "assistant", "content": "I look.", "tool_calls": made}]
    chat = Conversation.model_validate({"messages": messages}).as_chat()
    shown = tokenizer.render(chat.messages).replace(GUARD, "")
    return shown[shown.index("I look.") :].partition(EOS)[0].partition("<|im_end|>")[0]


@pytest.mark.parametrize("name", RENDERED)
@examples(15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(calls=call_lists, cuts=st.lists(st.integers(0, 400), max_size=20))
def test_calls_that_a_template_shows_are_read_as_they_were(
    name: str, calls: list, cuts: list[int], tokenizers: dict[str, Tokenizer]
) -> None:
    style = RENDERED[name][0]
    text = rendered(tokenizers[name], calls)
    reasoning, said, read = parse(pieces_of(text, cuts), style)
    assert (reasoning, said) == ("", "I look.")
    assert [(name, json.loads(arguments)) for name, arguments in read] == calls


@cache
def marks_of(style: Style) -> list[str]:
    if style is Style.V32:
        return [dsml.CALLS, dsml.CALLS_END, dsml.CALL, dsml.CALL_END, dsml.PARAMETER, dsml.PARAMETER_END]
    return [*(KIMI if style is Style.KIMI else DEEPSEEK)]


@pytest.mark.parametrize("style", Style)
@examples(40)
@given(data=st.data())
def test_broken_markup_never_makes_a_call_that_is_no_object(style: Style, data: st.DataObject) -> None:
    """Pieces of well-formed calls are left out, moved or doubled."""
    text = "I look." + FORMS[style](("weather", WEATHER), ("time", TIME), ("function", "{}"))
    for _ in range(data.draw(st.integers(1, 4))):
        a, b = sorted(data.draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
        where = data.draw(st.integers(0, len(text)))
        put = data.draw(st.sampled_from(["", text[a:b], "NaN", "\\", '"', "'", "x", "<", *marks_of(style)]))
        text = data.draw(st.sampled_from([text[:a] + text[b:], text[:where] + put + text[where:]]))
    said = parse([text], style)
    assert parse(pieces_of(text, data.draw(st.lists(st.integers(0, 400), max_size=9))), style) == said
    for name, arguments in said[2]:
        assert name in OFFER.names and isinstance(json.loads(arguments), dict)
    shown = said[1] + "".join(itertools.chain.from_iterable(said[2]))
    behind_fences = re.sub(r"```[^\n]*", "", text)  # what stands on the line of a fence names a language
    assert behind_fences.count("x") <= shown.count("x") <= text.count("x")


# ------------------------------------------------------------------------------------- DeepSeek's own parser


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


@examples(30)
@given(calls=call_lists, cuts=st.lists(st.integers(0, 400), max_size=9))
def test_calls_are_read_as_deepseek_reads_them(calls: list[tuple[str, dict[str, Any]]], cuts: list[int]) -> None:
    pieces = pieces_of("I look." + v32(*((name, json.dumps(arguments)) for name, arguments in calls)), cuts)
    _, text, read = parse(pieces, Style.V32)
    assert oracle([piece for piece in pieces if piece]) == (text, read)
