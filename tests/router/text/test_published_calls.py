"""Outputs as the models' cards and templates write them, letter by letter, cut at every character."""

from __future__ import annotations

import json

import pytest
from millrace_router.text.call_stream import Offer
from millrace_router.text.chat_format import Style
from router.text.test_parsers import parse

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
KIMI = (
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

OUTPUTS = {  # by name: (style, the prompt has begun the thoughts, the output, thoughts, text, calls)
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
    "Kimi K2": (Style.KIMI, False, KIMI, "", "", KIMI_CALLS),
    "Kimi K2, with a text": (Style.KIMI, False, f"I look it up.{KIMI}", "", "I look it up.", KIMI_CALLS),
    "K2 Thinking": (Style.KIMI, True, f"Now?</think>Wait. {KIMI}", "Now?", "Wait. ", KIMI_CALLS),
    "K2 Thinking, within its thoughts": (
        Style.KIMI, True, KIMI_THINKING, "The user wants the weather.\nI should call it.", "", KIMI_CALLS[:1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_what_models_write(name: str, certain: bool) -> None:
    style, thinking, output, *expected = OUTPUTS[name]
    offer = Offer(NAMES, certain=certain)
    whole = parse([output], style, thinking=thinking, offer=offer)
    thoughts, text, calls = whole
    assert [thoughts, text, [(called, json.loads(arguments)) for called, arguments in calls]] == expected
    assert parse(list(output), style, thinking=thinking, offer=offer) == whole
    for at in range(1, len(output)):
        assert parse([output[:at], output[at:]], style, thinking=thinking, offer=offer) == whole
