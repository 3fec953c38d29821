"""Tool calls and thoughts in DeepSeek's formats: what comes out is the same however the text is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from millrace_router.openai.answers import MessageParser
from millrace_router.text.markers import ALL, CALL, CALL_END, CALL_SEP, CALLS, CALLS_END, THINK, THINK_END

WEATHER, TIME = '{"city": "Oslo", "days": [1, 2]}', '{\n  "zone": "a```b"\n}'


def v3(*calls: tuple[str, str]) -> str:
    blocks = (f"{CALL}function{CALL_SEP}{name}\n```json\n{arguments}\n```{CALL_END}" for name, arguments in calls)
    return f"{CALLS}{chr(10).join(blocks)}{CALLS_END}"


def v31(*calls: tuple[str, str]) -> str:
    return CALLS + "".join(f"{CALL}{name}{CALL_SEP}{arguments}{CALL_END}" for name, arguments in calls) + CALLS_END


def parse(pieces: list[str], *, reasons: bool = True, thinking: bool = False, tools: bool = True) -> tuple:
    """(thoughts, text, calls). An empty last piece, as after a stop token, changes nothing."""
    parser = MessageParser(reasons=reasons, thinking=thinking, tools=tools)
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


@pytest.mark.parametrize("form", [v3, v31])
@pytest.mark.parametrize(
    "calls", [[("weather", WEATHER)], [("weather", WEATHER), ("time", TIME)], [("function", "{}")]]
)
def test_calls(form, calls) -> None:
    assert parse([form(*calls)]) == ("", "", calls)
    assert parse(["I look.\n\n" + form(*calls)]) == ("", "I look.\n\n", calls)
    assert parse([form(*calls), " Done"]) == ("", " Done", calls)
    assert [json.loads(arguments) for _, arguments in parse([form(*calls)])[2]]
    assert parse([form(*calls)], tools=False) == ("", form(*calls), [])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        (f"{CALLS}\n{CALL}weather{CALL_SEP} {WEATHER} \n{CALL_END}\n{CALLS_END}", [("weather", WEATHER)]),
        (f"{CALLS}{CALL}function{CALL_SEP}weather\n\n```\n{WEATHER}```\n{CALL_END}", [("weather", WEATHER)]),
        (f"{CALLS}{CALL}function{CALL_SEP}weather\n{WEATHER}\n{CALL_END}", [("weather", WEATHER)]),
        (f"{CALLS}{CALL}weather{CALL_SEP}{WEATHER}", [("weather", WEATHER)]),  # a stop string took the end
        (f"{CALLS}{CALL}function{CALL_SEP}weather\n```json\n{WEATHER}\n```", [("weather", WEATHER)]),
        (f"{CALLS}{CALL}weather{CALL_SEP}" + '{"city": "Os', [("weather", '{"city": "Os')]),  # cut off by max_tokens
        (f"{CALLS}{CALL}wea", []),
        (f"{CALLS}{CALL}function{CALL_SEP}wea", []),
        (f"{CALLS}{CALL}weather{CALL_END}{CALL}time{CALL_SEP}{{}}{CALL_END}{CALLS_END}", [("time", "{}")]),
        (f"{CALLS}{CALLS_END}", []),
        (f"{CALLS}{CALL}weather{CALL_SEP}{CALL_END}{CALLS_END}", [("weather", "")]),
        (CALLS[:-1], None),
    ],
)
def test_what_models_do_to_the_format(text: str, calls: list | None) -> None:
    assert parse([text]) == (("", text, []) if calls is None else ("", "", calls))


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


def test_thoughts_and_text_are_told_as_soon_as_they_are_certain() -> None:
    parser = MessageParser(reasons=True, thinking=True, tools=True)
    said = [parser.push(piece, last=False) for piece in ("one", " two ", THINK_END, "three", CALLS[:3], "x")]
    assert [s.thoughts for s in said] == ["one", " two", "", "", "", ""]
    assert [s.text for s in said] == ["", "", "", "three", "", CALLS[:3] + "x"]
    parser = MessageParser(reasons=False, thinking=False, tools=True)
    whole = v31(("weather", WEATHER))
    told = [parser.push(character, last=False).calls for character in whole]
    assert sum(map(bool, told)) > len(WEATHER) - 5, "arguments are streamed"


alphabet = st.sampled_from(
    [*ALL, *(marker[:4] for marker in ALL), "function", "name", "\n", "```", "`", "```json", " ", "{}", '{"a": 1}', "x"]
)


@settings(max_examples=1000)
@given(parts=st.lists(alphabet, max_size=24), cuts=st.lists(st.integers(0, 400), max_size=40), data=st.data())
def test_the_pieces_do_not_matter(parts: list[str], cuts: list[int], data: st.DataObject) -> None:
    begin = data.draw(st.sampled_from(["", f"{CALLS}{CALL}", f"{CALLS}{CALL}function{CALL_SEP}name\n```json\n"]))
    text, thinking = begin + "".join(parts), data.draw(st.booleans())
    at = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(at)]
    expected = parse([text], thinking=thinking)
    assert parse(pieces, thinking=thinking) == expected
    assert parse(list(text), thinking=thinking) == expected
