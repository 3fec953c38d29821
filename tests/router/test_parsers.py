"""Tool calls and thoughts in the formats of models: what comes out is the same however the text is cut."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace_router.flow.inference import Answer
from millrace_router.flow.stream import Delta
from millrace_router.openai.reading import Reading
from millrace_router.text import dsml
from millrace_router.text.chat_format import ChatFormat, Style
from millrace_router.text.markers import ALL, DEEPSEEK, KIMI, THINK, THINK_END
from millrace_router.text.message import MessageParser
from millrace_router.text.tokenizer import Tokenizer
from router.harness import write_tokenizer

CALLS, CALLS_END, CALL, CALL_END, CALL_SEP = DEEPSEEK
WEATHER, TIME = '{"city": "Oslo", "days": [1, 2]}', '{\n  "zone": "a```b"\n}'


def v3(*calls: tuple[str, str]) -> str:
    blocks = (f"{CALL}function{CALL_SEP}{name}\n```json\n{arguments}\n```{CALL_END}" for name, arguments in calls)
    return f"{CALLS}{chr(10).join(blocks)}{CALLS_END}"


def v31(*calls: tuple[str, str]) -> str:
    return CALLS + "".join(f"{CALL}{name}{CALL_SEP}{arguments}{CALL_END}" for name, arguments in calls) + CALLS_END


def kimi(*calls: tuple[str, str]) -> str:
    blocks = (f"{KIMI.call}functions.{name}:{i}{KIMI.sep}{text}{KIMI.call_end}" for i, (name, text) in enumerate(calls))
    return KIMI.calls + "".join(blocks) + KIMI.calls_end


def v32(*calls: tuple[str, str]) -> str:
    invokes = "\n".join(invoke(name, json.loads(text)) for name, text in calls)
    return f"{dsml.GAP}{dsml.CALLS}\n{invokes}\n{dsml.CALLS_END}"


def invoke(name: str, arguments: dict) -> str:
    lines = [f'{dsml.CALL} name="{name}">']
    for key, value in arguments.items():
        string = isinstance(value, str)
        text = value if string else json.dumps(value)
        lines.append(f'{dsml.PARAMETER} name="{key}" string="{str(string).lower()}">{text}{dsml.PARAMETER_END}')
    return "\n".join([*lines, dsml.CALL_END])


FORMS = {Style.V3: v3, Style.V31: v31, Style.V32: v32, Style.KIMI: kimi}


def parse(pieces: list[str], style: Style = Style.V31, *, thinking: bool = False, tools: bool = True) -> tuple:
    """(thoughts, text, calls). An empty last piece, as after a stop token, changes nothing."""
    parser = MessageParser(ChatFormat(style, reasons=True), thinking=thinking, tools=tools)
    thoughts, text, calls = "", "", []
    for i, piece in enumerate([*pieces, ""]):
        said = parser.push(piece, last=i == len(pieces))
        thoughts, text = thoughts + said.thoughts, text + said.text
        for call in said.calls:
            if call.index == len(calls):
                assert call.name
                calls.append((call.name, call.arguments))
            else:
                assert call.index == len(calls) - 1 and not call.name and call.arguments
                calls[-1] = calls[-1][0], calls[-1][1] + call.arguments
    return thoughts, text, calls


@pytest.mark.parametrize("style", Style)
@pytest.mark.parametrize(
    "calls", [[("weather", WEATHER)], [("weather", WEATHER), ("time", TIME)], [("function", "{}")]]
)
def test_calls(style: Style, calls: list) -> None:
    written = FORMS[style](*calls)
    thoughts, text, read = parse([written], style)
    assert (thoughts, text) == ("", "")
    assert [(name, json.loads(arguments)) for name, arguments in read] == [(n, json.loads(a)) for n, a in calls]
    assert style is Style.V32 or read == calls, "arguments are what the model wrote"
    assert parse(["I look.\n\n" + written], style) == ("", "I look.\n\n", read)
    assert parse([written, " Done"], style) == ("", " Done", read)
    assert parse([written], style, tools=False) == ("", written, [])


def test_calls_of_kimi_keep_their_ids() -> None:
    parser = Style.KIMI.parser()
    head = f"{KIMI.calls}{KIMI.call} functions.get.it:12 {KIMI.sep}"
    assert [(c.name, c.id) for c in parser.push(head)] == [("get.it", "functions.get.it:12")]
    assert [(c.name, c.id) for c in parser.push(f"{{}}{KIMI.call_end}{KIMI.call}time{KIMI.sep}")] == [
        ("", ""),
        ("time", ""),
    ]


JUNK = f"{CALL}weather{CALL_END}"
INVOKE = f'{dsml.CALL} name="weather">'
CITY = f'{dsml.PARAMETER} name="city" string="true">'


@pytest.mark.parametrize(
    ("output", "text", "calls"),
    [
        (f"{CALLS}\n{CALL}weather{CALL_SEP} {WEATHER} \n{CALL_END}\n{CALLS_END}", "", [("weather", WEATHER)]),
        (f"{CALLS}{CALL}function{CALL_SEP}weather\n\n```\n{WEATHER}```\n{CALL_END}", "", [("weather", WEATHER)]),
        (f"{CALLS}{CALL}function{CALL_SEP}weather\n{WEATHER}\n{CALL_END}", "", [("weather", WEATHER)]),
        (f"{CALLS}{CALL}weather{CALL_SEP}{WEATHER}", "", [("weather", WEATHER)]),  # a stop string took the end
        (f"{CALLS}{CALL}function{CALL_SEP}weather\n```json\n{WEATHER}\n```", "", [("weather", WEATHER)]),
        (f"{CALLS}{CALL}weather{CALL_SEP}" + '{"city": "Os', "", [("weather", '{"city": "Os')]),  # max_tokens
        (f"{CALLS}{CALL}wea", f"{CALL}wea", []),
        (f"{CALLS}{CALL}function{CALL_SEP}wea", f"{CALL}function{CALL_SEP}wea", []),
        (f"{CALLS}{JUNK}{CALL}time{CALL_SEP}{{}}{CALL_END}{CALLS_END}", JUNK, [("time", "{}")]),
        (f"{CALLS}{CALL} {CALL_SEP}{{}}{CALL_END}\n{CALLS_END}", f"{CALL} {CALL_SEP}{{}}{CALL_END}", []),
        (f"{CALLS}\nI try.\n{CALL}time{CALL_SEP}{{}}{CALL_END}{CALLS_END}", "\nI try.", [("time", "{}")]),
        (f"{CALLS}{CALLS_END}", "", []),
        (f"{CALLS}{CALL}weather{CALL_SEP}{CALL_END}{CALLS_END}", "", [("weather", "")]),
        (CALLS[:-1], CALLS[:-1], []),
    ],
)
def test_what_models_do_to_the_format(output: str, text: str, calls: list) -> None:
    assert parse([output]) == ("", text, calls)


@pytest.mark.parametrize(
    ("output", "text", "calls"),
    [
        (f"{dsml.CALLS}{INVOKE}{dsml.CALL_END}", "", [("weather", "{}")]),
        (f'{dsml.CALLS}{INVOKE}{CITY}a"\nb', "", [("weather", '{"city": "a\\"\\nb')]),  # cut off by max_tokens
        (f"{dsml.CALLS}{dsml.CALL} weather>x", f"{dsml.CALL} weather>x", []),
        (f"{dsml.CALLS}{INVOKE}{dsml.PARAMETER} city>Oslo", f"{dsml.PARAMETER} city>Oslo", [("weather", "")]),
        (f"{dsml.CALLS}{dsml.CALL} na", f"{dsml.CALL} na", []),
        (f"{dsml.CALLS}{INVOKE}{dsml.PARAMETER} na", f"{dsml.PARAMETER} na", [("weather", "")]),
        (f"{dsml.CALLS} so {INVOKE} it {dsml.CALL_END}", " so it", [("weather", "{}")]),
        (f"I look.\n\n\n{dsml.CALLS}{INVOKE}{dsml.CALL_END}", "I look.\n", [("weather", "{}")]),
        (f"I look.\n{dsml.CALLS}{INVOKE}{dsml.CALL_END}", "I look.\n", [("weather", "{}")]),
    ],
)
def test_what_models_do_to_dsml(output: str, text: str, calls: list) -> None:
    assert parse([output], Style.V32) == ("", text, calls)
    assert parse(list(output), Style.V32) == ("", text, calls)


@pytest.mark.parametrize(
    ("text", "thinking", "thoughts", "answer"),
    [
        ("Hello", False, "", "Hello"),
        (f"{THINK}\nSo.\n{THINK_END}\n\nHello \n", False, "So.", "Hello \n"),
        (f" \n{THINK}So.{THINK_END}Hello", False, "So.", "Hello"),
        (f"\nSo.\n\nYes.\n{THINK_END}\n\nHello", True, "So.\n\nYes.", "Hello"),
        ("\nSo.\n", True, "So.", ""),
        (f"a {THINK}b{THINK_END}", False, "", f"a {THINK}b{THINK_END}"),
        (f"{THINK}{THINK_END}\n\nHello", False, "", "Hello"),
        (f"So {THINK_END} 1 {THINK_END}", True, "So", f"1 {THINK_END}"),
        ("<thi", False, "", "<thi"),
        ("so </thin", True, "so </thin", ""),
        ("  hi", False, "", "  hi"),
    ],
)
def test_thoughts(text: str, thinking: bool, thoughts: str, answer: str) -> None:
    assert parse([text], thinking=thinking) == (thoughts, answer, [])


def test_a_call_inside_the_thoughts_is_a_thought() -> None:
    inside = v31(("weather", "{}"))
    assert parse([f"{inside}{THINK_END}{v3(('time', '{}'))}"], thinking=True) == (inside, "", [("time", "{}")])


def test_a_call_ends_the_thoughts_of_kimi() -> None:
    calls = kimi(("time", "{}"))
    assert parse([f"So.\n{calls}"], Style.KIMI, thinking=True) == ("So.", "", [("time", "{}")])
    assert parse([f"{THINK}So. {THINK_END}Hm.{calls}"], Style.KIMI) == ("So.", "Hm.", [("time", "{}")])


@pytest.mark.parametrize("style", Style)
def test_thoughts_and_text_are_told_as_soon_as_they_are_certain(style: Style) -> None:
    parser = MessageParser(ChatFormat(Style.V31, reasons=True), thinking=True, tools=True)
    said = [parser.push(piece, last=False) for piece in ("one", " two ", THINK_END, "three", CALLS[:3], "x")]
    assert [s.thoughts for s in said] == ["one", " two", "", "", "", ""]
    assert [s.text for s in said] == ["", "", "", "three", "", CALLS[:3] + "x"]
    parser = MessageParser(ChatFormat(style), thinking=False, tools=True)
    whole = FORMS[style](("weather", WEATHER))
    told = [parser.push(character, last=False).calls for character in whole]
    assert sum(map(bool, told)) >= len('Oslo", [1, 2]}'), "arguments are streamed"


alphabet = st.sampled_from(
    [
        *(*ALL, *(marker[:4] for marker in ALL), "function", "name", "functions.name:0", "\n", "```", "`", "```json"),
        *(" ", "{}", '{"a": 1}', "x", "x", dsml.CALLS, dsml.CALLS_END, dsml.CALL, dsml.CALL_END, dsml.PARAMETER),
        *(dsml.PARAMETER_END, ' name="a">', ' name="a" string="true">', ">"),
    ]
)
BEGINNINGS = [
    ("", Style.V31),
    (f"{CALLS}{CALL}", Style.V31),
    (f"{CALLS}{CALL}function{CALL_SEP}name\n```json\n", Style.V3),
    (f"{KIMI.calls}{KIMI.call}", Style.KIMI),
    (f"{dsml.CALLS}{INVOKE}", Style.V32),
    (f"{dsml.CALLS}{INVOKE}{CITY}", Style.V32),
]


@settings(max_examples=1000, deadline=None)
@given(parts=st.lists(alphabet, max_size=24), cuts=st.lists(st.integers(0, 400), max_size=40), data=st.data())
def test_the_pieces_do_not_matter(parts: list[str], cuts: list[int], data: st.DataObject) -> None:
    begin, style = data.draw(st.sampled_from(BEGINNINGS))
    text, thinking = begin + "".join(parts), data.draw(st.booleans())
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(at)]
    expected = parse([text], style, thinking=thinking)
    assert parse(pieces, style, thinking=thinking) == expected
    assert parse(list(text), style, thinking=thinking) == expected
    if "```" not in text:  # a code block's language is dropped
        thoughts, shown, calls = expected
        kept = [thoughts, shown, *itertools.chain.from_iterable(calls)]
        assert sum(part.count("x") for part in kept) == text.count("x"), "nothing that the model wrote is lost"


@pytest.mark.parametrize("size", [1, 2, 99])
def test_tokens_of_thoughts_are_counted_alike_however_the_output_is_cut(size: int, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, markers=(THINK, THINK_END)))
    ids = tokenizer._encode(f"{THINK}\nHm.{THINK_END}Yes", add_bos=False)
    parser = MessageParser(tokenizer.format, thinking=False, tools=False)
    reading = Reading(Answer("", "", 1, False, None), tokenizer)
    for at in range(0, len(ids), size):
        piece = ids[at : at + size]
        reading.read(
            Delta(0, parser.push(tokenizer.decode(piece), last=False), piece, [], 0, at + len(piece), 0, 0, 0, at == 0)
        )
    assert reading.reasoning_tokens == len("\nHm.") + 2
