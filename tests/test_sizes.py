"""The sums in sizes.toml are limits: a change may lower one, and never raises it."""

import ast
import math
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest
from millrace_bench.config_leaves import count
from millrace_testing.paths import ROOT

SIZES = tomllib.loads((Path(__file__).parent / "sizes.toml").read_text())


@cache
def texts(*folders: str) -> list[str]:
    """Of the Python files of these folders that git tracks."""
    listed = subprocess.run(["git", "ls-files", "-z", *folders], cwd=ROOT, check=True, capture_output=True, text=True)
    paths = (ROOT / name for name in listed.stdout.split("\0") if name.endswith(".py"))
    return [path.read_text() for path in paths if path.is_file()]  # one that was just removed is still listed


@pytest.mark.parametrize("name", SIZES["lines"])
def test_lines_of_a_part_are_below_its_limit(name: str) -> None:
    part = SIZES["lines"][name]
    lines = sum(text.count("\n") for text in texts(*part["folders"]))
    assert lines <= part["limit"], f"{name} has {lines} lines, and may have {part['limit']}: remove some"


def test_configuration_keys_are_below_their_limit() -> None:
    """Each is one more thing that an operator may get wrong."""
    assert sum(count().values()) <= SIZES["configuration_keys"], count()


def test_nine_in_ten_functions_of_the_product_are_short() -> None:
    lengths = sorted(
        node.end_lineno - node.lineno + 1
        for text in texts(*SIZES["lines"]["product"]["folders"])
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno
    )
    assert lengths[math.ceil(0.9 * len(lengths)) - 1] <= SIZES["function_lines_p90"]
