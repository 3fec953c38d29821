"""What dependent launch asks of every kernel, checked in their sources: a GPU shows a race only now and then."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from millrace_kernels.triton import launch

WEIGHTS = {"w_ptr", "weight", "weight_ptr", "kv_weight_ptr", "w_scale_at", "second_scale_at"}


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(Path(launch.__file__).parent.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "PDL" in [arg.arg for arg in node.args.args]:
                yield path.name, node


KERNELS = [pytest.param(file, node, id=f"{file}:{node.name}") for file, node in kernels() if file != "launch.py"]


def calls(node: ast.AST) -> Iterator[tuple[int, str, ast.Call]]:
    """line, name, call, in the source's order"""
    found = [n for n in ast.walk(node) if isinstance(n, ast.Call)]
    for call in sorted(found, key=lambda n: (n.lineno, n.col_offset)):
        yield call.lineno, ast.unparse(call.func), call


def test_there_are_kernels() -> None:
    assert len(KERNELS) > 20


@pytest.mark.parametrize(("file", "kernel"), KERNELS)
def test_a_kernel_waits_before_it_touches_what_others_do(file: str, kernel: ast.FunctionDef) -> None:
    found = list(calls(kernel))
    waits = [line for line, name, _ in found if name == "wait"]
    assert waits, "a kernel that does not wait may end before those before it"
    for line, name, call in found:
        if line >= waits[0]:
            break
        assert not name.startswith(("tl.store", "tl.atomic")) and name != "go_ahead", f"{file}:{line}: {name}"
        if name == "tl.load":
            assert {n.id for n in ast.walk(call.args[0]) if isinstance(n, ast.Name)} & WEIGHTS, f"{file}:{line}"


# Scalars that follow the number of tokens. Triton would compile a kernel again for a multiple of 16, and a request wait
# for it: the rehearsed sizes are not of every kind, since the strides of scales are rounded up to 4.
SIZES = {"num_tokens", "tokens", "scale_stride", "stride_scale_k", "scale_column", "out_scale_col", "x_scale_col"}


@pytest.mark.parametrize(("file", "kernel"), KERNELS)
def test_a_kernel_is_not_compiled_for_kinds_of_sizes(file: str, kernel: ast.FunctionDef) -> None:
    plain = " ".join(map(ast.unparse, kernel.decorator_list))
    assert {name for name in SIZES & {arg.arg for arg in kernel.args.args} if f"'{name}'" not in plain} == set()
