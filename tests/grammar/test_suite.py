"""JSON Schema's own tests (its licence is beside them): what compiles allows nothing that they forbid.

They are copied from jsonschema 4.26.0, without descriptions of the single instances, and without the remote documents,
which no schema may refer to here.
"""

import collections
import json
from pathlib import Path
from typing import Any

import pytest
from grammar.texts import allows, schema
from millrace_common.grammar.source import GrammarError

SUITE = [json.loads(line) for line in Path(__file__).with_name("json_schema_test_suite.jsonl").open(encoding="utf-8")]
COUNTS = {"draft2020-12": (246, 192, 50), "draft7": (205, 106, 30)}  # compiled, refused, allowed instances that are not
NARROWER = {  # files of the suite whose schemas allow less than they say, and why
    "format": "known formats are enforced",
    "optional/format": "leap seconds, quoted and literal addresses, long hosts and punycode are left out",
    "const": "whole numbers have no fraction; properties have one order",
    "enum": "as const",
    "type": "whole numbers have no fraction",
    "allOf": "properties have one order",
    "dependentRequired": "properties have one order",
    "dependencies": "properties have one order",
    "optional/dependencies-compatibility": "properties have one order",
    "optional/ecmascript-regex": "control characters without a short escape are left out",
    "optional/float-overflow": "whole numbers have no exponent",
    "unevaluatedProperties": "if alone, which evaluates properties, is left out",
}


@pytest.mark.parametrize("draft", COUNTS)
def test_nothing_forbidden_is_allowed(draft: str) -> None:
    counts: collections.Counter[str] = collections.Counter()
    for name, about, given, instances in SUITE:
        if not name.startswith(f"{draft}/"):
            continue
        file = name.removeprefix(f"{draft}/")
        if draft == "draft7" and isinstance(given, dict):
            given = {"$schema": "http://json-schema.org/draft-07/schema#", **given}
        try:
            grammar = schema(given)
        except GrammarError as error:
            assert str(error).startswith(("at #", "it must")), error
            counts["refused"] += 1
            continue
        counts["compiled"] += 1
        for instance, valid in instances:
            if (found := _allows(grammar, instance)) is None or found == valid:
                continue
            assert valid, (name, about, given, instance)
            counts["narrower"] += 1
            assert any(file == key or file.startswith(f"{key}/") for key in NARROWER), (name, about, given, instance)
    assert (counts["compiled"], counts["refused"], counts["narrower"]) == COUNTS[draft]


def _allows(grammar: str, instance: Any) -> bool | None:
    """In the form that grammars write; None: the instance has no text."""
    try:
        return allows(grammar, json.dumps(instance, ensure_ascii=False))
    except UnicodeEncodeError:
        return None
