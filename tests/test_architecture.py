"""The rules of the source tree that a reader may rely on. docs/architecture.md says why.

Everything is read with `ast`; nothing is imported.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from millrace_testing.paths import ROOT

FOLDERS = ("proto", "kernels", "services", "router", "bench")  # what pyproject.toml puts on the path
MAX_FILE, MAX_FUNCTION = 400, 60

BELOW_ROLES = ("engine", "transfer", "worker")
# Package → the packages of ours that it may import. More specific names win; a package may always import itself.
MAY_IMPORT = {
    "millrace": set(),
    "millrace_rpc": {"millrace"},
    "millrace_kernels": set(),
    "millrace_router": {"millrace", "millrace_rpc"},
    "millrace_serve.model": {"millrace_kernels", "millrace_rpc"},
    "millrace_serve.engine": {"millrace_serve.model", "millrace_kernels", "millrace_rpc"},
    "millrace_serve.transfer": {"millrace_serve.engine", "millrace_serve.model", "millrace_rpc"},
    "millrace_serve.worker": {
        "millrace",
        "millrace_rpc",
        "millrace_kernels",
        "millrace_serve.model",
        "millrace_serve.engine",
        "millrace_serve.transfer",
    },
    "millrace_serve.prefill": {"millrace", "millrace_rpc", *(f"millrace_serve.{part}" for part in BELOW_ROLES)},
    "millrace_serve.decode": {"millrace", "millrace_rpc", *(f"millrace_serve.{part}" for part in BELOW_ROLES)},
}
ANYTHING = ("millrace_cli", "millrace_bench")  # on top of everything: they start it and measure it
NO_TORCH_NO_GRPC = (
    "millrace_serve/engine/core.py",
    "millrace_serve/engine/block_pool.py",
    "millrace_serve/engine/plan.py",
    "millrace_serve/engine/sequence.py",
    "millrace_serve/engine/radix.py",
    "millrace_serve/engine/*scheduler*.py",
)
NO_TORCH = ("millrace_rpc/*.py", "millrace_router/**/*.py", "millrace_cli/*.py")
NO_PROTOBUF = (*NO_TORCH_NO_GRPC, "millrace_serve/engine/*.py", "millrace_serve/model/*.py", "millrace_kernels/**/*.py")


@dataclass(frozen=True)
class Module:
    path: Path
    name: str  # dotted
    tree: ast.Module
    lines: int

    def imports(self, top_level_only: bool = False) -> Iterator[str]:
        """Dotted names of imported modules; for `from a import b` both `a` and `a.b`."""
        for node in self.top_level() if top_level_only else ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def top_level(self) -> Iterator[ast.AST]:
        """Nodes that run at import: not the inside of functions, nor of `if TYPE_CHECKING`."""
        stack: list[ast.AST] = [self.tree]
        while stack:
            node = stack.pop()
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            yield node
            stack.extend(ast.iter_child_nodes(node))

    def package(self) -> str:
        """The row of MAY_IMPORT that holds for this module."""
        return next(name for name in longest_first() if is_within(self.name, name))


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def longest_first() -> list[str]:
    return sorted([*MAY_IMPORT, *ANYTHING, "millrace_serve"], key=len, reverse=True)


@functools.cache
def modules() -> tuple[Module, ...]:
    found = []
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("millrace*/**/*.py")):
            if "_pb2" not in path.name:
                text = path.read_text()
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                found.append(Module(path, name, ast.parse(text), text.count("\n")))
    return tuple(found)


def matching(patterns: tuple[str, ...]) -> list[Module]:
    hits = []
    for pattern in patterns:
        paths = {path for folder in FOLDERS for path in (ROOT / folder).glob(pattern)}
        assert paths, f"{pattern} matches nothing: the rule has lost its file"
        hits += [module for module in modules() if module.path in paths]
    return hits


def forbidden(hits: list[Module], roots: set[str]) -> dict[str, list[str]]:
    """Module → forbidden imports, also those hidden inside functions."""
    found = {module.name: [name for name in module.imports() if name.split(".")[0] in roots] for module in hits}
    return {name: imports for name, imports in found.items() if imports}


def test_every_module_was_found() -> None:
    tops = {module.name.split(".")[0] for module in modules()}
    assert tops == {
        "millrace_rpc",
        "millrace_kernels",
        "millrace_serve",
        "millrace_cli",
        "millrace_router",
        "millrace_bench",
    }


def test_imports_go_downwards_only() -> None:
    wrong = []
    for module in modules():
        package = module.package()
        if package in ANYTHING or package == "millrace_serve":
            continue
        allowed = MAY_IMPORT[package] | {package}
        for name in module.imports():
            ours = is_within(name, "millrace") or name.startswith("millrace_")
            if ours and name != "millrace_serve" and not any(is_within(name, other) for other in allowed):
                wrong.append(f"{module.name} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_nothing_imports_the_top() -> None:
    wrong = [
        f"{module.name} imports {name}"
        for module in modules()
        for name in module.imports()
        if name.split(".")[0] in ANYTHING and module.name.split(".")[0] not in ANYTHING
    ]
    assert not wrong, "\n".join(wrong)


def test_schedulers_and_pools_know_neither_torch_nor_grpc() -> None:
    assert forbidden(matching(NO_TORCH_NO_GRPC), {"torch", "grpc"}) == {}


def test_router_and_cli_need_no_torch() -> None:
    assert forbidden(matching(NO_TORCH), {"torch", "transformers", "safetensors", "nixl"}) == {}


def test_protobuf_types_stay_above_the_engine() -> None:
    assert forbidden(matching(NO_PROTOBUF), {"millrace", "google"}) == {}


def test_grpc_stays_out_of_model_and_kernels() -> None:
    assert forbidden(matching(("millrace_serve/model/*.py", "millrace_kernels/**/*.py")), {"grpc"}) == {}


def test_no_import_cycles() -> None:
    names = {module.name for module in modules()}
    graph = {
        module.name: {name for name in module.imports(top_level_only=True) if name in names} for module in modules()
    }
    for name, imported in graph.items():
        imported.discard(name)
        imported -= {other for other in imported if is_within(name, other)}  # a package's own __init__ is always loaded
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")
    assert len(order) == len(names)


def test_environment_is_read_at_the_edge_only() -> None:
    """In `__main__` modules, in the command line and in the benches. Passing `os.environ` on to a child is fine
    there.
    """
    wrong = []
    for module in modules():
        if module.path.name == "__main__.py" or module.package() in ANYTHING:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("os.environ", "os.getenv", "os.putenv"):
                wrong.append(f"{module.path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def test_no_print_outside_command_line_and_benches() -> None:
    wrong = []
    for module in modules():
        if module.path.name == "__main__.py" or module.package() in ANYTHING:
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "print":
                wrong.append(f"{module.path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, "\n".join(wrong)


def test_no_bare_except() -> None:
    wrong = [
        f"{module.path.relative_to(ROOT)}:{node.lineno}"
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not wrong, "\n".join(wrong)


def test_files_are_short() -> None:
    long = {str(module.path.relative_to(ROOT)): module.lines for module in modules() if module.lines > MAX_FILE}
    assert long == {}, f"limit {MAX_FILE}"


def test_functions_are_short() -> None:
    long = {}
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION:
                    long[f"{module.path.relative_to(ROOT)}:{node.name}"] = length
    assert long == {}, f"limit {MAX_FUNCTION}"


def test_top_level_folders_are_not_packages() -> None:
    """`kernels` and `proto` are names of packages that others ship."""
    assert [folder for folder in (*FOLDERS, "tests") if (ROOT / folder / "__init__.py").exists()] == []


def test_every_package_has_tests() -> None:
    """tests/ mirrors the packages: millrace_serve's parts one folder each, the others by their last word."""
    packages = {module.name.split(".")[0].removeprefix("millrace_") for module in modules()} - {"serve"}
    parts = {module.name.split(".")[1] for module in modules() if module.name.startswith("millrace_serve.")}
    roles = {"prefill", "decode", "worker", "__main__"}  # tested together, as workers
    wanted = packages | (parts - roles) | {"worker"}
    missing = {name for name in wanted if not list((ROOT / "tests" / name).glob("**/test_*.py"))}
    assert not missing
