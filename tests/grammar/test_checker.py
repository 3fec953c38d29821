"""Compiling cannot be made a weapon: every text ends within limits, and with those who wait for it."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from millrace_common.grammar.checker import Checker, NobodyWaits
from millrace_common.grammar.child import CPU_S
from millrace_common.grammar.source import GrammarError

PRODUCT = {
    "$defs": {
        str(i): {"type": "object", "properties": {n: {"type": "object", "$ref": f"#/$defs/{i + 1}"} for n in "ab"}}
        for i in range(20)
    }
    | {"20": {"type": "object"}},
    "$ref": "#/$defs/0",
}  # 2^20 objects
HOSTILE: dict[str, tuple[str, Any]] = {
    "stars": ("regex", ".*" * 2_000),
    "options": ("regex", "a?" * 2_000),
    "repeats": ("regex", "((((a|b){0,9999}){0,9999}){0,9999}c?){0,9999}"),
    "classes": ("regex", r"[\p{L}\p{N}]" * 300),
    "gaps": ("regex", "|".join(f".*{chr(97 + i % 26)}.{{{i * 7}}}b" for i in range(250))),
    "product": ("json_schema", PRODUCT),
    "patterns": ("json_schema", {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(100, 200)]}),
    "unions": ("json_schema", {"allOf": [{"anyOf": [{"maxLength": 99 * i + k} for k in range(30)]} for i in range(5)]}),
    "chain": ("json_schema", {"$ref": "#/$defs/0", "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}}
                                                           for i in range(1_200)} | {"1200": {}}}),
    "items": ("json_schema", {"type": "array", "minItems": 100_000, "maxItems": 100_000}),
    "values": ("json_schema", {"enum": [f"v{i}" for i in range(6_000)]}),
    "properties": ("json_schema", {"properties": {f"p{i}": {} for i in range(4_000)}}),
    "length": ("json_schema", {"type": "string", "minLength": 100_000, "pattern": "a.*b"}),
    "multiples": ("json_schema", {"type": "integer", "allOf": [{"multipleOf": i} for i in (9973, 9967, 9949)]}),
    "digits": ("json_schema", {"minimum": 1e-300}),
}  # fmt: skip


@pytest.fixture(scope="module")
def checker() -> Iterator[Checker]:
    made = Checker(1)
    yield made
    made.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_texts_end(checker: Checker, name: str) -> None:
    """Whatever the answer is; the next grammar compiles."""
    kind, text = HOSTILE[name]
    try:
        checker.check(kind, text if isinstance(text, str) else json.dumps(text), threading.Event())
    except GrammarError as error:
        assert 5 < len(str(error)) < 300 and "\n" not in str(error)
    assert checker.check("regex", "a+", threading.Event()).endswith("start: /a+/")


def test_a_grammar_over_the_limits_is_refused_with_the_limit(checker: Checker) -> None:
    with pytest.raises(GrammarError, match=f"more than {CPU_S} s or .* MB to compile"):
        checker.check("json_schema", json.dumps(PRODUCT), threading.Event())


def test_a_job_that_is_given_up_frees_its_process() -> None:
    """A process that never answers, and two that wait for it: all end when they are given up."""
    checker = Checker(1)
    checker.check("regex", "a", threading.Event())
    child = checker._children[0]._process
    child.send_signal(19)  # SIGSTOP
    given_up = [threading.Event() for _ in range(3)]
    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(checker.check, "regex", "b", event) for event in given_up]
        for event in given_up:
            event.set()
        for job in jobs:
            with pytest.raises(NobodyWaits):
                job.result(60)
    assert child.returncode is not None, "it was killed"
    assert checker.check("regex", "b", threading.Event())
    checker.close()
