"""Tools whose parameters are no object's, as the APIs take or refuse them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from router.harness import Cluster
from router.openai.test_openai_tools import allowed
from router.scripted import HELLO, grammar_of, prompt_of, say
from router.text.test_parsers import v31

OBJECT, TEXT, NULL = {"type": "object"}, {"type": "string"}, {"type": "null"}
PLACE = {"properties": {"city": TEXT}, "required": ["city"]}
A, B = ({"properties": {"kind": {"const": kind}}, "required": ["kind"]} for kind in ("a", "b"))
ENDLESS = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}  # no grammar holds it: such a call is not forced
SCHEMAS: list[tuple[Any, Any]] = [  # of parameters, and what becomes of them; None: 400
    ({}, OBJECT),
    ({"description": "Any."}, OBJECT | {"description": "Any."}),
    (PLACE, OBJECT | PLACE),
    (OBJECT | PLACE, OBJECT | PLACE),
    ({"type": ["object", "null"]} | PLACE, OBJECT | PLACE),
    ({"anyOf": [PLACE, NULL, TEXT]}, OBJECT | {"anyOf": [PLACE]}),
    ({"oneOf": [OBJECT | A, NULL, OBJECT | B]}, OBJECT | {"oneOf": [OBJECT | A, OBJECT | B]}),
    ({"enum": [{"a": 1}, 1, None]}, OBJECT | {"enum": [{"a": 1}]}),
    ({"const": {"a": 1}}, OBJECT | {"const": {"a": 1}}),
    ({"allOf": [PLACE, OBJECT]}, OBJECT | {"allOf": [PLACE, OBJECT]}),
    ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": PLACE}}, OBJECT | {"$ref": "#/$defs/a~1b", "$defs": {"a/b": PLACE}}),
    (ENDLESS, OBJECT | ENDLESS),
    *((schema, None) for schema in (
        TEXT, {"type": ["string", "null"]}, {"type": []}, {"type": "dict"}, {"enum": [1, "a"]}, {"enum": []},
        {"const": 7}, {"anyOf": [TEXT, NULL]}, {"oneOf": [{"enum": [1]}, False]}, {"anyOf": []},
        {"allOf": [PLACE, TEXT]},
        OBJECT | {"anyOf": [TEXT]}, {"$ref": "#/$defs/a", "$defs": {"a": TEXT}}, True, False, [], "object", 7,
    )),
]  # fmt: skip


async def test_parameters_are_of_an_object(serve: Callable, folders: dict[str, Path]) -> None:
    """In every API, whether or not the call is forced: arguments are an object, so no grammar makes a 777."""
    made = await serve("v31")
    for given, wanted in SCHEMAS:
        await check(made, folders["v31"], given, wanted)


async def check(made: Cluster, folder: Path, given: Any, wanted: Any) -> None:
    messages = {"messages": HELLO, "max_tokens": 9}
    function = {"name": "f", "parameters": given}
    named = {"type": "function", "function": {"name": "f"}}
    choice = "auto" if given == ENDLESS else named
    for path, body, where in (
        ("chat/completions", messages | {"tool_choice": choice, "tools": [{"type": "function", "function": function}]},
         "tools[0].function.parameters"),
        ("responses", {"input": "x", "tools": [{"type": "function", **function}]}, "tools[0].parameters"),
        ("messages", messages | {"tools": [{"name": "f", "input_schema": given}]}, "tools[0].input_schema"),
    ):  # fmt: skip
        say(made, v31(("f", "{}")))
        answer = await made.http.post(f"/v1/{path}", json=body)
        if wanted is None:
            assert answer.status_code == 400 and where in answer.json()["error"]["message"], answer.text
            continue
        assert answer.status_code == 200 and f"Parameters: {json.dumps(wanted)}" in prompt_of(made), answer.text
        if body.get("tool_choice") == named:
            grammar = grammar_of(made)
            assert not any(allowed(folder, grammar, v31(("f", text))) for text in ("777", "null", "[]"))
