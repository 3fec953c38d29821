"""Kernels are not compiled again for another number of tokens; their sources show it."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from millrace_kernels import triton

# Scalars that follow the number of tokens, of sequences, or the longest sequence. Triton compiles a kernel again for a
# multiple of 16, and a request would wait for the compiler: the warmed sizes are not of every kind, since strides of
# scales are rounded up to 4. Whole steps are compared in tests/engine/start/test_every_request.py.
SIZES = {
    "num_tokens", "tokens", "num_queries", "num_seqs", "page_table_row",
    "scale_stride", "stride_scale_k", "scale_column", "out_scale_col", "x_scale_col",
}  # fmt: skip
# Arrays of numbers of 4 bytes, of which a step passes parts: they begin at any sequence.
PARTS = {"page_table_ptr", "seq_lens_ptr", "lens_ptr"}


def kernels() -> Iterator[tuple[str, ast.FunctionDef]]:
    for path in sorted(Path(triton.__path__[0]).glob("*.py")):
        tree = ast.parse(path.read_text())
        indexed = [node.value for node in ast.walk(tree) if isinstance(node, ast.Subscript)]
        launched = {value.id for value in indexed if isinstance(value, ast.Name)}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list and node.name in launched:
                yield path.name, node


KERNELS = [pytest.param(node, id=f"{file}:{node.name}") for file, node in kernels()]


def test_there_are_kernels() -> None:
    assert len(KERNELS) > 20


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernel_is_not_compiled_for_kinds_of_sizes(kernel: ast.FunctionDef) -> None:
    plain = " ".join(map(ast.unparse, kernel.decorator_list))
    names = {arg.arg for arg in kernel.args.args}
    assert {name for name in names & (SIZES | PARTS) if f"'{name}'" not in plain} == set()
    assert not names & PARTS or "do_not_specialize_on_alignment" in plain
