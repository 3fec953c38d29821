"""Tool calls and reasoning in the formats of models: what comes out is the same however the text is cut."""

import json
from pathlib import Path

import pytest
from millrace_router.apis.reading import Reading
from millrace_router.flow.inference import Answer
from millrace_router.flow.stream import Delta
from millrace_router.text import dsml
from millrace_router.text.call_stream import Offer
from millrace_router.text.chat_format import ChatFormat, Style
from millrace_router.text.markers import DEEPSEEK, KIMI, THINK, THINK_END
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


OFFER = Offer(("weather", "time", "function", "name", "get_it"))
CERTAIN = OFFER._replace(certain=True)  # a grammar is set
CALL_MARKS = {  # around each call
    Style.V3: (CALL, CALL_END),
    Style.V31: (CALL, CALL_END),
    Style.V32: (dsml.CALL, dsml.CALL_END),
    Style.KIMI: (KIMI.call, KIMI.call_end),
}
FORMS = {Style.V3: v3, Style.V31: v31, Style.V32: v32, Style.KIMI: kimi}


def parse(
    pieces: list[str],
    style: Style = Style.V31,
    *,
    thinking: bool = False,
    offer: Offer | None = OFFER,
    cut: bool = False,
) -> tuple:
    """(reasoning, text, calls). An empty last piece, as after a stop token, changes nothing."""
    parser = MessageParser(ChatFormat(style, reasons=True), thinking=thinking, offer=offer)
    reasoning, text, calls = "", "", []
    for i, piece in enumerate([*pieces, ""]):
        said = parser.push(piece, last=i == len(pieces), cut=cut)
        reasoning, text = reasoning + said.reasoning, text + said.text
        for call in said.calls:
            if call.index == len(calls):
                assert call.name
                calls.append((call.name, call.arguments))
            else:
                assert call.index == len(calls) - 1 and not call.name and call.arguments
                calls[-1] = calls[-1][0], calls[-1][1] + call.arguments
    return reasoning, text, calls


@pytest.mark.parametrize("style", Style)
@pytest.mark.parametrize(
    "calls", [[("weather", WEATHER)], [("weather", WEATHER), ("time", TIME)], [("function", "{}")]]
)
def test_calls_are_read_beside_text_and_only_when_offered(style: Style, calls: list) -> None:
    written = FORMS[style](*calls)
    reasoning, text, read = parse([written], style)
    assert (reasoning, text) == ("", "")
    assert [(name, json.loads(arguments)) for name, arguments in read] == [(n, json.loads(a)) for n, a in calls]
    assert style is Style.V32 or read == calls, "arguments are what the model wrote"
    assert parse(["I look.\n\n" + written], style) == ("", "I look.\n\n", read)
    assert parse([written, " Done"], style) == ("", " Done", read)
    assert parse([written], style, offer=None) == ("", written, [])


def test_calls_of_kimi_keep_their_ids_unless_they_are_taken() -> None:
    def ids(*heads: str) -> list[tuple[str, str]]:
        parser = Style.KIMI.parser(OFFER._replace(ids=("functions.time:3",)))
        calls = "".join(f"{KIMI.call} {head} {KIMI.sep}{{}}{KIMI.call_end}" for head in heads)
        return [(call.name, call.id) for call in parser.push(f"{KIMI.calls}{calls}")]

    assert ids("functions.get_it:12") == [("get_it", "functions.get_it:12")]
    assert ids("functions.time:3", "functions.time:3") == [
        ("time", "functions.time:4"), ("time", "functions.time:5"),
    ]  # fmt: skip
    assert ids("time", "weather:0") == [("time", "functions.time:1"), ("weather", "functions.weather:0")]


@pytest.mark.parametrize(
    ("head", "names", "meant"),
    [
        ("functions.weather:0", ("weather",), "weather"),
        ("functions.weather_0:1", ("weather_0", "weather"), "weather_0"),
        ("functions_weather_0", ("weather", "time"), "weather"),
        ("weather:0", ("weather",), "weather"),
        ("functions.weather", ("weather",), "weather"),
        ("functions.weather_2", ("weather_2",), "weather_2"),
        ("weather", ("weather",), "weather"),
        ("weather_0", ("weather", "weather_0"), "weather_0"),
        ("functions.weather_0", ("weather", "weather_0"), ""),  # may mean either
        ("functions.functions-a:0", ("functions-a", "a"), "functions-a"),
        ("functions", ("functions",), "functions"),
        ("a.b:0", ("a.b",), "a.b"),
        ("functions.a-b_c9:0", ("a-b_c9",), "a-b_c9"),
        ("functions.weather:0", ("time",), ""),
        ("call00003", ("weather",), ""),
        ("0", ("weather",), ""),
        (":0", ("weather",), ""),
        ("functions.:0", ("weather",), ""),
        ("functions.weather:" + "9" * 5000, ("weather",), ""),
        ("functions.weather:٣", ("weather",), ""),
    ],
)
def test_heads_of_kimi_mean_functions_of_the_request(head: str, names: tuple[str, ...], meant: str) -> None:
    written = f"{KIMI.call}{head}{KIMI.sep}{{}}{KIMI.call_end}"
    read = parse([f"{KIMI.calls}{written}{KIMI.calls_end}"], Style.KIMI, offer=Offer(names))
    assert read == (("", "", [(meant, "{}")]) if meant else ("", written, []))


JUNK = f"{CALL}weather{CALL_END}"
OTHER = f"{CALL}other{CALL_SEP}{{}}{CALL_END}"
WEATHER_CALL = f"{CALL}weather{CALL_SEP}"
V3_WEATHER = f"{CALL}function{CALL_SEP}weather"


@pytest.mark.parametrize(
    ("output", "text", "calls"),
    [
        (f"{CALLS}\n{WEATHER_CALL} {WEATHER} \n{CALL_END}\n{CALLS_END}", "", [("weather", WEATHER)]),
        (f"{CALLS}{V3_WEATHER}\n\n```\n{WEATHER}```\n{CALL_END}", "", [("weather", WEATHER)]),
        (f"{CALLS}{V3_WEATHER}\n{WEATHER}\n{CALL_END}", "", [("weather", WEATHER)]),
        (f"{CALLS}{V3_WEATHER}\n{WEATHER}{CALL_END}", "", [("weather", WEATHER)]),
        (f"{CALLS}{V3_WEATHER}\n```json\n{WEATHER}\n```", "", [("weather", WEATHER)]),
        (f"{CALLS}{WEATHER_CALL}{WEATHER}", "", [("weather", WEATHER)]),  # a stop string took the end
        (f"{CALLS}{WEATHER_CALL}{WEATHER}{CALL}time{CALL_SEP}{{}}{CALL_END}", "",
         [("weather", WEATHER), ("time", "{}")]),
        (f"{CALLS}{WEATHER_CALL}{WEATHER}{CALLS_END}so", "so", [("weather", WEATHER)]),
        (f"{CALLS}{WEATHER_CALL}{{}}{CALL_END}a{CALLS}{CALL}time{CALL_SEP}{{}}{CALL_END}{CALLS_END}b", "ab",
         [("weather", "{}"), ("time", "{}")]),
        (f"{CALLS}{JUNK}{CALL}time{CALL_SEP}{{}}{CALL_END}{CALLS_END}", JUNK, [("time", "{}")]),
        (f"{CALLS}{OTHER}{CALL}time{CALL_SEP}{{}}{CALL_END}{CALLS_END}", OTHER, [("time", "{}")]),
        (f"{CALLS}{CALL} {CALL_SEP}{{}}{CALL_END}\n{CALLS_END}", f"{CALL} {CALL_SEP}{{}}{CALL_END}", []),
        (f"{CALLS}\nI try.\n{CALL}time{CALL_SEP}{{}}{CALL_END}{CALLS_END}", "\nI try.", [("time", "{}")]),
        (f"{CALLS}{CALLS_END}", "", []),
        (f"{CALLS}{WEATHER_CALL}{CALL_END}{CALLS_END}", "", [("weather", "{}")]),
        (f"{CALLS}{V3_WEATHER}{CALL_END}", "", [("weather", "{}")]),
        (f"{CALLS}{V3_WEATHER}\n```json\n\n```{CALL_END}", "", [("weather", "{}")]),
        (f"{CALLS}{CALL}function{CALL_SEP}{CALL_END}", "", [("function", "{}")]),
        (CALLS[:-1], CALLS[:-1], []),
    ],
)  # fmt: skip
def test_what_models_do_to_the_format(output: str, text: str, calls: list) -> None:
    assert parse([output]) == ("", text, calls)
    assert parse(list(output)) == ("", text, calls)


NO_OBJECTS = [
    *("777", "null", "[]", '"{}"', '"{\\"city\\": \\"Oslo\\"}"', '{"city": Oslo}', "{'city': 'Oslo'}", "{", '{"a": 1'),
    *('{"a": 1,}', '{"a": 1} so', '{"a": 1}{"b": 2}', 'so {"a": 1}', '{"a": NaN}', '{"a": -Infinity}', '{"a": 1e999}'),
    *('{"a": 1, "a": 2}', '{"a": {"b": 1, "b": 1}}', '{"a": "\\ud800"}', '{"a": "x\ny"}', '{"a": 01}', "Oslo", "``"),
    *('{"a":' * 200 + "1" + "}" * 200, "[" * 100_000, '{"a": ' + "9" * 5000 + "}"),
]  # fmt: skip


@pytest.mark.parametrize("arguments", NO_OBJECTS)
@pytest.mark.parametrize("style", [Style.V3, Style.V31, Style.KIMI])
def test_a_call_whose_arguments_are_no_object_stays_text(style: Style, arguments: str) -> None:
    whole = FORMS[style](("weather", arguments), ("time", "{}"))
    bad = FORMS[style](("weather", arguments))
    bad = bad[bad.index(CALL_MARKS[style][0]) : bad.index(CALL_MARKS[style][1]) + len(CALL_MARKS[style][1])]
    assert parse([whole], style) == ("", bad, [("time", "{}")])
    assert parse([whole[i : i + 7] for i in range(0, len(whole), 7)], style) == ("", bad, [("time", "{}")])


INVOKE = f'{dsml.CALL} name="weather">'
CITY = f'{dsml.PARAMETER} name="city" string="true">'
DAYS = f'{dsml.PARAMETER} name="days" string="false">'
END = dsml.PARAMETER_END


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", {}),
        ("\n\n", {}),
        (f'\n{CITY}a"\n\\b{END}', {"city": 'a"\n\\b'}),
        (f"{CITY}{END}", {"city": ""}),
        (f"{DAYS} [1, 2]\n{END}{CITY}</x>{END}", {"days": [1, 2], "city": "</x>"}),
        (f"{dsml.PARAMETER} string='true'  name='a \"b\"' >x{END}", {"a \"b\"": "x"}),
        (f'{dsml.PARAMETER}\n string="false"\n name="a>b">"x"{END}', {"a>b": "x"}),
        (f"{CITY}Oslo{END} so {DAYS}1{END}", None),  # text between
        (f"so {CITY}Oslo{END}", None),
        (f"{CITY}Oslo{END} so", None),
        (f"{CITY}Oslo{END}{CITY}Rome{END}", None),  # twice
        (f'{CITY}Oslo\n{DAYS}1{END}', None),  # without its end
        (f"{CITY}Oslo", None),
        (f"{dsml.PARAMETER} city>Oslo{END}", None),
        (f'{dsml.PARAMETER} string="true">Oslo{END}', None),  # without a name
        (f'{dsml.PARAMETER} name="city">Oslo{END}', None),  # text or JSON
        (f'{dsml.PARAMETER} name="city" string="yes">Oslo{END}', None),
        (f'{dsml.PARAMETER} name="city" name="b" string="true">Oslo{END}', None),
        (f'{dsml.PARAMETER} name="city" type="x" string="true">Oslo{END}', None),
        (f'{dsml.PARAMETER} name="city string="true">Oslo{END}', None),
        (f'{dsml.PARAMETER}s name="city" string="true">Oslo{END}', None),
        *((f"{DAYS}{text}{END}", None) for text in ("Oslo", "", "1 so", "[1", "NaN", "-Infinity", '{"a":1,"a":2}')),
    ],
)  # fmt: skip
def test_what_models_do_to_dsml(body: str, arguments: dict | None) -> None:
    call, good = f"{INVOKE}{body}{dsml.CALL_END}", f'{dsml.CALL} name="time">{dsml.CALL_END}'
    for pieces in ([f"{dsml.CALLS}{call}{good}{dsml.CALLS_END}"], list(f"{dsml.CALLS}{call}{good}{dsml.CALLS_END}")):
        reasoning, text, calls = parse(pieces, Style.V32)
        assert calls.pop() == ("time", "{}")
        assert (reasoning, text, [(name, json.loads(said)) for name, said in calls]) == (
            ("", call, []) if arguments is None else ("", "", [("weather", arguments)])
        )


@pytest.mark.parametrize(
    ("output", "text", "calls"),
    [
        (f"{dsml.CALLS}{dsml.CALL} weather>x", f"{dsml.CALL} weather>x", []),
        (f"{dsml.CALLS}{dsml.CALL} na", f"{dsml.CALL} na", []),
        (f"{dsml.CALLS}{INVOKE}{CITY}Oslo{END}", f"{INVOKE}{CITY}Oslo{END}", []),  # a parameter may be missing
        (f"{dsml.CALLS}{INVOKE}{INVOKE}{dsml.CALL_END}", INVOKE, [("weather", "{}")]),
        (f"{dsml.CALLS}{INVOKE}{dsml.CALLS_END}so", f"{INVOKE}so", []),
        (f"{dsml.CALLS}{INVOKE}{dsml.CALL_END}a{dsml.GAP}{dsml.CALLS}{INVOKE}{dsml.CALL_END}", "a",
         [("weather", "{}")] * 2),
        (f'{dsml.CALLS}{dsml.CALL} name="other">{dsml.CALL_END}', f'{dsml.CALL} name="other">{dsml.CALL_END}', []),
        (f"{dsml.CALLS} so {INVOKE}{dsml.CALL_END}", " so", [("weather", "{}")]),
        (f"I look.\n\n\n{dsml.CALLS}{INVOKE}{dsml.CALL_END}", "I look.\n", [("weather", "{}")]),
        (f"I look.\n{dsml.CALLS}{INVOKE}{dsml.CALL_END}", "I look.\n", [("weather", "{}")]),
    ],
)  # fmt: skip
def test_what_models_do_to_lists_of_dsml(output: str, text: str, calls: list) -> None:
    assert parse([output], Style.V32) == ("", text, calls)
    assert parse(list(output), Style.V32) == ("", text, calls)


@pytest.mark.parametrize(
    ("text", "thinking", "reasoning", "answer"),
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
def test_reasoning_ends_at_its_mark(text: str, thinking: bool, reasoning: str, answer: str) -> None:
    assert parse([text], thinking=thinking) == (reasoning, answer, [])


def test_a_call_inside_the_reasoning_is_a_thought() -> None:
    inside = v31(("weather", "{}"))
    assert parse([f"{inside}{THINK_END}{v3(('time', '{}'))}"], thinking=True) == (inside, "", [("time", "{}")])


@pytest.mark.parametrize("style", Style)
def test_reasoning_and_text_are_told_as_soon_as_they_are_certain(style: Style) -> None:
    parser = MessageParser(ChatFormat(Style.V31, reasons=True), thinking=True, offer=OFFER)
    said = [parser.push(piece, last=False) for piece in ("one", " two ", THINK_END, "three", CALLS[:3], "x")]
    assert [s.reasoning for s in said] == ["one", " two", "", "", "", ""]
    assert [s.text for s in said] == ["", "", "", "three", "", CALLS[:3] + "x"]
    parser = parser_of(style, CERTAIN)
    whole = FORMS[style](("weather", WEATHER))
    told = [parser.push(character, last=False).calls for character in whole]
    assert sum(map(bool, told)) >= len("Oslo") + 2, "arguments that a grammar makes are streamed"
    (call,) = parser_of(style).push(whole, last=False).calls
    parser = parser_of(style)
    told = [c for piece in whole for c in parser.push(piece, last=False).calls]
    assert told == [call], "others come when they are whole"


def parser_of(style: Style, offer: Offer = OFFER) -> MessageParser:
    return MessageParser(ChatFormat(style), thinking=False, offer=offer)


@pytest.mark.parametrize("size", [1, 2, 99])
def test_tokens_of_reasoning_are_counted_alike_however_the_output_is_cut(size: int, tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path, markers=(THINK, THINK_END)))
    ids = tokenizer._encode(f"{THINK}\nHm.{THINK_END}Yes", add_bos=False)
    parser = MessageParser(tokenizer.format, thinking=False, offer=None)
    reading = Reading(Answer("", "", 1, False, None), tokenizer)
    for at in range(0, len(ids), size):
        piece = ids[at : at + size]
        reading.read(
            Delta(0, parser.push(tokenizer.decode(piece), last=False), piece, [], 0, at + len(piece), 0, 0, 0, at == 0)
        )
    assert reading.reasoning_tokens == len("\nHm.") + 2


# ------------------------------------------------------------------------------------- outputs as models write them


NAMES = "get_current_weather", "get_weather", "get_time", "search", "web_search", "run", "get_datetime"
BEIJING, SHANGHAI = ({"location": f"{city}, China", "unit": "celsius"} for city in ("Beijing", "Shanghai"))

V3 = """<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_current_weather
```json
{"location": "Beijing, China", "unit": "celsius"}
```<｜tool▁call▁end｜>
<｜tool▁call▁begin｜>function<｜tool▁sep｜>get_current_weather
```json
{
  "location": "Shanghai, China",
  "unit": "celsius"
}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"""
V31 = (
    '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_current_weather<｜tool▁sep｜>{"location": "Beijing, China", '
    '"unit": "celsius"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>get_current_weather<｜tool▁sep｜>{"location": '
    '"Shanghai, China", "unit": "celsius"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
)
V32 = """

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_datetime">
<｜DSML｜parameter name="timezone" string="true">Asia/Shanghai</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="search">
<｜DSML｜parameter name="query" string="true">weather "北京"
tomorrow & <b>later</b></｜DSML｜parameter>
<｜DSML｜parameter name="topn" string="false">10</｜DSML｜parameter>
<｜DSML｜parameter name="source" string="false">["web", {"lang": "zh"}]</｜DSML｜parameter>
<｜DSML｜parameter name="exact" string="false">true</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
V32_CALLS = [
    ("get_datetime", {"timezone": "Asia/Shanghai"}),
    (
        "search",
        {
            "query": 'weather "北京"\ntomorrow & <b>later</b>',
            "topn": 10,
            "source": ["web", {"lang": "zh"}],
            "exact": True,
        },
    ),
]
V32_EMPTY = """

<｜DSML｜function_calls>
<｜DSML｜invoke name="get_datetime">
</｜DSML｜invoke>
</｜DSML｜function_calls>"""
KIMI_K2 = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
    '{"city": "Beijing"}<|tool_call_end|><|tool_call_begin|>functions.get_time:1<|tool_call_argument_begin|>'
    '{"city":"北京","zone":null}<|tool_call_end|><|tool_calls_section_end|>'
)
KIMI_CALLS = [("get_weather", {"city": "Beijing"}), ("get_time", {"city": "北京", "zone": None})]
KIMI_THINKING = (
    "The user wants the weather.\nI should call it.<|tool_calls_section_begin|><|tool_call_begin|>"
    'functions.get_weather:4<|tool_call_argument_begin|>{"city": "Beijing"}<|tool_call_end|>'
    "<|tool_calls_section_end|>"
)
TWO = [("get_current_weather", BEIJING), ("get_current_weather", SHANGHAI)]

OUTPUTS = {  # by name: (style, the prompt has begun the reasoning, the output, reasoning, text, calls)
    "V3": (Style.V3, False, V3, "", "", TWO),
    "V3, with a text": (Style.V3, False, f"I look it up.\n{V3}", "", "I look it up.\n", TWO),
    "R1": (Style.V3, True, f"Two cities.\n</think>\n\n{V3}", "Two cities.", "", TWO),
    "R1-0528": (Style.V3, False, f"<think>\nTwo cities.\n</think>\n{V3}", "Two cities.", "", TWO),
    "V3.1": (Style.V31, False, V31, "", "", TWO),
    "V3.1, with a text": (Style.V31, False, f"I look it up.{V31}", "", "I look it up.", TWO),
    "V3.1, thinking": (Style.V31, True, f"Two cities.</think>{V31}", "Two cities.", "", TWO),
    "V3.2": (Style.V32, False, V32, "", "", V32_CALLS),
    "V3.2, thinking": (Style.V32, True, f"Now?</think>I look it up.{V32}", "Now?", "I look it up.", V32_CALLS),
    "V3.2, without arguments": (Style.V32, False, V32_EMPTY, "", "", [("get_datetime", {})]),
    "Kimi K2": (Style.KIMI, False, KIMI_K2, "", "", KIMI_CALLS),
    "Kimi K2, with a text": (Style.KIMI, False, f"I look it up.{KIMI_K2}", "", "I look it up.", KIMI_CALLS),
    "K2 Thinking": (Style.KIMI, True, f"Now?</think>Wait. {KIMI_K2}", "Now?", "Wait. ", KIMI_CALLS),
    "K2 Thinking, within its reasoning": (
        Style.KIMI, True, KIMI_THINKING, "The user wants the weather.\nI should call it.", "", KIMI_CALLS[:1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_what_models_write(name: str, certain: bool) -> None:
    style, thinking, output, *expected = OUTPUTS[name]
    offer = Offer(NAMES, certain=certain)
    whole = parse([output], style, thinking=thinking, offer=offer)
    reasoning, text, calls = whole
    assert [reasoning, text, [(called, json.loads(arguments)) for called, arguments in calls]] == expected
    assert parse(list(output), style, thinking=thinking, offer=offer) == whole
    for at in range(1, len(output)):
        assert parse([output[:at], output[at:]], style, thinking=thinking, offer=offer) == whole
