"""Compiling cannot be made a weapon: every text ends within limits, and with those who wait for it."""

import json
import os
import resource
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import pytest
from millrace_common.grammar import checker as checker_module
from millrace_common.grammar.checker import Checker, CompilerStarved, NobodyWaits
from millrace_common.grammar.child import CPU_S
from millrace_common.grammar.source import GrammarError
from millrace_testing import HANG_S

PRODUCT = {
    "$defs": {
        str(i): {"type": "object", "properties": {n: {"type": "object", "$ref": f"#/$defs/{i + 1}"} for n in "ab"}}
        for i in range(20)
    }
    | {"20": {"type": "object"}},
    "$ref": "#/$defs/0",
}  # 2^20 objects
HOSTILE: dict[str, tuple[str, Any]] = {
    "stars": ("regex", ".*" * 1_000),
    "options": ("regex", "a?" * 1_000),
    "repeats": ("regex", "((((a|b){0,9999}){0,9999}){0,9999}c?){0,9999}"),
    "classes": ("regex", r"[\p{L}\p{N}]" * 300),
    "gaps": ("regex", "|".join(f".*{chr(97 + i % 26)}.{{{i * 7}}}b" for i in range(250))),
    "patterns": ("json_schema", {"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(100, 150)]}),
    "unions": ("json_schema", {"allOf": [{"anyOf": [{"maxLength": 99 * i + k} for k in range(30)]} for i in range(5)]}),
    "chain": ("json_schema", {"$ref": "#/$defs/0", "$defs": {str(i): {"items": {"$ref": f"#/$defs/{i + 1}"}}
                                                           for i in range(1_200)} | {"1200": {}}}),
    "items": ("json_schema", {"type": "array", "minItems": 100_000, "maxItems": 100_000}),
    "values": ("json_schema", {"enum": [f"v{i}" for i in range(6_000)]}),
    "properties": ("json_schema", {"properties": {f"p{i}": {} for i in range(1_000)}}),
    "length": ("json_schema", {"type": "string", "minLength": 100_000, "pattern": "a.*b"}),
    "multiples": ("json_schema", {"type": "integer", "allOf": [{"multipleOf": i} for i in (9973, 9967, 9949)]}),
    "digits": ("json_schema", {"minimum": 1e-300}),
}  # fmt: skip


def one_process() -> Iterator[Checker]:
    made = Checker(1)
    yield made
    made.close()


checker = pytest.fixture(one_process, scope="module")
fresh = pytest.fixture(one_process)


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
    assert checker.check("regex", "a+", threading.Event()).endswith("start: /a+/")


@pytest.mark.parametrize(
    ("name", "value"),
    [("WAIT_S", 0.0), ("_START", "import os; os.kill(os.getpid(), 9)"), ("_START", "import nothing_of_this_name")],
)
def test_process_that_is_starved_or_ended(fresh: Checker, name: str, value: object) -> None:
    """It says nothing of the grammar, which would be remembered as too complex."""
    with mock.patch.object(checker_module, name, value), pytest.raises(CompilerStarved):
        fresh.check("regex", "a", threading.Event())
    assert fresh.check("regex", "a", threading.Event())


def test_compiles_beside_a_thousand_connections(fresh: Checker) -> None:
    """The descriptor of the process's answer is a large number then, which `select` refuses."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    taken = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        assert fresh.check("regex", "a", threading.Event())
        assert fresh._children[0]._process.stdout.fileno() >= 1024
    finally:
        for fd in taken:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("end", [signal.SIGXCPU, signal.SIGABRT, signal.SIGSEGV])
def test_a_limit_ends_a_process_for_its_grammar(fresh: Checker, end: signal.Signals) -> None:
    dies = f"import os, sys; sys.stdin.readline(); os.kill(os.getpid(), {end.value})"
    with mock.patch.object(checker_module, "_START", dies), pytest.raises(GrammarError):
        fresh.check("regex", "a+", threading.Event())


def test_a_job_that_is_given_up_frees_its_process(fresh: Checker) -> None:
    """A process that never answers, and two that wait for it: all end when they are given up."""
    fresh.check("regex", "a", threading.Event())
    child = fresh._children[0]._process
    child.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, child.pid, os.WSTOPPED)  # until then a busy machine lets its other threads go on
    looks = threading.Semaphore(0)

    class GivenUp(threading.Event):
        def is_set(self) -> bool:
            looks.release()
            return super().is_set()

    given_up = GivenUp()  # of all: a job that is given up later would start a process that answers
    with ThreadPoolExecutor(3) as threads:
        jobs = [threads.submit(fresh.check, "regex", "b", given_up) for _ in range(3)]
        assert all(looks.acquire(timeout=HANG_S) for _ in range(2)), "the second look comes after the question"
        given_up.set()
        for job in jobs:
            with pytest.raises(NobodyWaits):
                job.result(HANG_S)
    assert child.returncode is not None, "it was killed"
    assert fresh.check("regex", "b", threading.Event())
