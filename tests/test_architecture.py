"""The rules of the source tree that a reader may rely on. docs/architecture.md says why.

Everything is read with `ast`; nothing is imported.
"""

from __future__ import annotations

import ast
import collections
import functools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from millrace_testing.paths import ROOT

FOLDERS = ("proto", "kernels", "services", "router", "bench")  # what pyproject.toml puts on the path
MAX_FILE, MAX_FUNCTION = 400, 60

# Package or module → the packages and modules of ours that it may import. The longest name that fits holds, and
# everything may import itself.
COMMON, RPC, STUBS, KERNELS = "millrace_common", "millrace_rpc", "millrace", "millrace_kernels"
MODEL, TRANSFER, HANDOVER = "millrace_serve.model", "millrace_serve.transfer", "millrace_serve.handover"
PLAN = "millrace_serve.plan"
ENGINE, WORKER, ROUTER = "millrace_serve.engine", "millrace_serve.worker", "millrace_router"
CORE, LIMITS = f"{ENGINE}.core", f"{ENGINE}.config"
CACHE, GRAMMAR, SCHEDULE, STEP = (f"{ENGINE}.{part}" for part in ("cache", "grammar", "schedule", "step"))
LOCKSTEP, DRAFTS, OFFLOAD, HEALTH = (f"{ENGINE}.{part}" for part in ("lockstep", "drafts", "offload", "health"))
CONTEXT_PARALLEL = f"{ENGINE}.context_parallel"
BOTH_PROCESSES = {f"{WORKER}.{part}" for part in ("config", "messages", "channels")}
MAY_IMPORT = {
    STUBS: set(),
    COMMON: set(),
    RPC: {STUBS, COMMON},
    KERNELS: set(),
    ROUTER: {STUBS, COMMON, RPC},
    f"{ROUTER}.config": {COMMON},
    f"{ROUTER}.text": {STUBS, COMMON, RPC},
    f"{ROUTER}.discovery": {COMMON, f"{ROUTER}.config"},
    f"{ROUTER}.policy": {STUBS, COMMON, f"{ROUTER}.config"},
    f"{ROUTER}.window": set(),
    f"{ROUTER}.health": {STUBS, COMMON, RPC, *(f"{ROUTER}.{part}" for part in ("config", "window", "policy.snapshot"))},
    f"{ROUTER}.fleet": {
        STUBS,
        COMMON,
        RPC,
        *(f"{ROUTER}.{part}" for part in ("config", "discovery", "policy", "health")),
    },
    f"{ROUTER}.duties": {
        *(STUBS, COMMON, RPC),
        *(f"{ROUTER}.{part}" for part in ("config", "policy", "fleet", "window")),
    },
    f"{ROUTER}.queue": {COMMON, RPC, f"{ROUTER}.policy"},
    f"{ROUTER}.flow": {
        *(STUBS, COMMON, RPC),
        *(f"{ROUTER}.{part}" for part in ("config", "policy", "health", "fleet", "duties", "queue", "text")),
    },
    f"{ROUTER}.http": {COMMON, RPC, *(f"{ROUTER}.{part}" for part in ("config", "queue", "flow"))},
    f"{ROUTER}.admin": {STUBS, COMMON, RPC, *(f"{ROUTER}.{part}" for part in ("policy", "fleet", "flow", "http"))},
    f"{ROUTER}.apis": {STUBS, COMMON, RPC, *(f"{ROUTER}.{part}" for part in ("text", "queue", "flow", "http"))},
    MODEL: {KERNELS, COMMON},
    ENGINE: set(),
    CORE: set(),
    LIMITS: {COMMON, CORE, f"{DRAFTS}.limits", f"{OFFLOAD}.limits"},
    f"{ENGINE}.engine": {CORE, LIMITS, CACHE, GRAMMAR, SCHEDULE, OFFLOAD, LOCKSTEP, STEP},
    CACHE: {CORE, COMMON, f"{OFFLOAD}.host_copies"},
    GRAMMAR: {CORE, COMMON},
    SCHEDULE: {CORE, LIMITS, CACHE, GRAMMAR, f"{DRAFTS}.counts", COMMON},
    STEP: {
        CORE,
        LIMITS,
        CACHE,
        SCHEDULE,
        DRAFTS,
        CONTEXT_PARALLEL,
        f"{LOCKSTEP}.packing",
        MODEL,
        KERNELS,
        COMMON,
    },
    OFFLOAD: {CACHE, f"{TRANSFER}.base", COMMON},
    DRAFTS: {LIMITS, SCHEDULE, STEP, MODEL, KERNELS},
    f"{DRAFTS}.limits": {COMMON, f"{MODEL}.config"},
    CONTEXT_PARALLEL: {STEP, MODEL},
    HEALTH: {STEP, COMMON},
    LOCKSTEP: {SCHEDULE, STEP, f"{HEALTH}.progress", f"{OFFLOAD}.page_copier", MODEL, COMMON},
    f"{ENGINE}.sim": {ENGINE, COMMON},
    f"{ENGINE}.start": {ENGINE, MODEL, KERNELS, COMMON, PLAN},
    PLAN: {COMMON, LIMITS, f"{DRAFTS}.limits", f"{MODEL}.config"},
    TRANSFER: {CORE, COMMON},
    WORKER: {STUBS, COMMON, RPC, ENGINE, TRANSFER, PLAN},
    f"{WORKER}.config": {COMMON, LIMITS, f"{ENGINE}.sim", PLAN},
    f"{WORKER}.messages": {COMMON, CORE, CACHE, f"{HEALTH}.rank_watch", TRANSFER},
    f"{WORKER}.channels": {COMMON, CORE},
    f"{WORKER}.launcher": {f"{WORKER}.config"},
    f"{WORKER}.frontend": {
        *(
            STUBS,
            COMMON,
            RPC,
            CORE,
            LIMITS,
            f"{DRAFTS}.limits",
            CACHE,
            f"{ENGINE}.start.phases",
            f"{HEALTH}.rank_watch",
            f"{TRANSFER}.base",
            f"{TRANSFER}.messages",
        ),
        *(*BOTH_PROCESSES, f"{WORKER}.launcher"),
    },
    f"{WORKER}.rank": {COMMON, MODEL, ENGINE, TRANSFER, PLAN, *BOTH_PROCESSES},
    HANDOVER: {
        *(STUBS, COMMON, RPC, CORE, LIMITS, TRANSFER, f"{WORKER}.config"),
        *(f"{WORKER}.{part}" for part in ("frontend", "messages")),
    },
    "millrace_serve.prefill": {STUBS, COMMON, RPC, ENGINE, TRANSFER, WORKER, HANDOVER},
    "millrace_serve.decode": {STUBS, COMMON, RPC, ENGINE, TRANSFER, WORKER, HANDOVER},
}
ANYTHING = ("millrace_cli", "millrace_load", "millrace_bench")  # on top of everything: they start it and measure it
NO_TORCH_NO_GRPC = (
    "millrace_serve/engine/*.py",
    "millrace_serve/engine/schedule/*.py",
    "millrace_serve/engine/cache/[!k]*.py",
    "millrace_serve/engine/cache/kv_cache.py",  # and not kv_pool.py, which makes pools of tensors too
    "millrace_serve/engine/grammar/*.py",
    "millrace_serve/engine/health/*.py",
    "millrace_serve/engine/offload/[!c]*.py",  # and not cuda_copier.py
    "millrace_serve/engine/drafts/[!s]*.py",  # and not speculate.py
    "millrace_serve/engine/sim/*.py",
)
NO_TORCH = ("millrace_common/*.py", "millrace_rpc/*.py", "millrace_router/**/*.py", "millrace_cli/*.py")
NO_GRPC = (
    "millrace_common/*.py",
    "millrace_serve/model/**/*.py",
    "millrace_serve/engine/**/*.py",
    "millrace_serve/transfer/*.py",
    "millrace_serve/worker/rank/*.py",
    "millrace_kernels/**/*.py",
)
NO_TENSORS = tuple(f"millrace_serve/{part}/*.py" for part in ("worker/frontend", "handover", "prefill", "decode"))
ENVIRONMENT = ("environ", "getenv", "putenv")  # of os
TARGET = re.compile(r"millrace_\w+(\.\w+)+(:\w+)?")  # a module, or a function of one, named by a string


@dataclass(frozen=True)
class Module:
    path: Path
    name: str  # dotted
    tree: ast.Module
    lines: int

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    def imports(self, nodes: Iterable[ast.AST] | None = None) -> Iterator[str]:
        """Dotted names of the modules that are imported by `nodes`, or anywhere in the module."""
        for node in self.nodes if nodes is None else nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
                yield from {name if name in names() else node.module for name in inner.values()}

    def run(self, functions: bool = False) -> Iterator[ast.AST]:
        """Nodes that run when the module is imported, or with `functions` all, those for types only among them."""
        stack: list[ast.AST] = [self.tree]
        while stack:
            node = stack.pop()
            if not functions and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
                continue
            if not functions and isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
                continue
            yield node
            stack.extend(ast.iter_child_nodes(node))

    def targets(self) -> Iterator[str]:
        """Modules, and functions of modules, that strings name: `a.b.c`, `a.b.c:function`."""
        for node in self.nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and TARGET.fullmatch(node.value):
                yield node.value
            elif (
                isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "_ours"
            ):  # of the kernel table
                yield f"{KERNELS}.triton.{ast.literal_eval(node.args[0])}"

    def defined(self) -> set[str]:
        """Names of functions, classes and variables of the module."""
        stored = (node for node in self.nodes if isinstance(getattr(node, "ctx", None), ast.Store))
        found = {node.name for node in self.tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        return found | {node.id for node in stored if isinstance(node, ast.Name)}

    def package(self) -> str:
        """The row of MAY_IMPORT that holds for this module."""
        longest_first = sorted([*MAY_IMPORT, *ANYTHING, "millrace_serve"], key=len, reverse=True)
        return next(name for name in longest_first if is_within(self.name, name))


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def files() -> Iterator[tuple[str, Path]]:
    """Dotted names of our modules, and where they are."""
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).glob("millrace*/**/*.py")):
            if "_pb2" not in path.name:
                parts = path.relative_to(ROOT / folder).with_suffix("").parts
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


@functools.cache
def names() -> frozenset[str]:
    return frozenset(name for name, _ in files())


@functools.cache
def modules() -> tuple[Module, ...]:
    texts = ((name, path, path.read_text()) for name, path in files())
    return tuple(Module(path, name, ast.parse(text), text.count("\n")) for name, path, text in texts)


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
        "millrace_common",
        "millrace_rpc",
        "millrace_kernels",
        "millrace_serve",
        "millrace_cli",
        "millrace_router",
        "millrace_load",
        "millrace_bench",
    }


def test_imports_go_downwards_only() -> None:
    wrong = []
    for module in modules():
        package = module.package()
        if package in ANYTHING or package == "millrace_serve":
            continue
        allowed = MAY_IMPORT[package] | {package}
        for name in (*module.imports(), *(target.partition(":")[0] for target in module.targets())):
            ours = is_within(name, "millrace") or name.startswith("millrace_")
            if ours and not any(is_within(name, other) for other in allowed):
                wrong.append(f"{module.name} imports {name}")
    assert not wrong, "\n".join(wrong)


def test_what_strings_name_is_there() -> None:
    """The kernel table, and programs that are started with `python -m`."""
    found = {target: module.name for module in modules() for target in module.targets()}
    by_name = {module.name: module for module in modules()}
    wrong = []
    for target, module in found.items():
        name, _, function = target.partition(":")
        if name not in by_name or (function and function not in by_name[name].defined()):
            wrong.append(f"{module} names {target}")
    assert not wrong, "\n".join(wrong)
    assert sum(module == f"{KERNELS}.backend" for module in found.values()) > 30


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


def test_frontends_have_no_tensors() -> None:
    assert forbidden(matching(NO_TENSORS), {"torch", "numpy"}) == {}


def test_grpc_and_protobuf_stay_above_the_engine_and_out_of_ranks() -> None:
    assert forbidden(matching(NO_GRPC), {"grpc", "grpc_status", "google", STUBS, RPC}) == {}


def loaded_with(package: str) -> set[str]:
    """Everything, ours and not, that importing all of the package imports at once."""
    todo = [module.name for module in modules() if is_within(module.name, package)]
    by_name = {module.name: module for module in modules()}
    found: set[str] = set()
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += by_name[name].imports(by_name[name].run()) if name in by_name else ()
    return found


@pytest.mark.parametrize(
    ("package", "roots"),
    [(f"{WORKER}.rank", {"grpc", STUBS, RPC}), (f"{WORKER}.main", {"torch"}), (HANDOVER, {"torch"})],
)
def test_process_does_not_load_what_the_other_one_is_for(package: str, roots: set[str]) -> None:
    """Neither does what it imports."""
    found = loaded_with(package)
    assert COMMON + ".config" in found
    assert {name for name in found if name.split(".")[0] in roots} == set()


@pytest.mark.parametrize("functions", [False, True], ids=["import", "call or type"])
def test_no_import_cycles(functions: bool) -> None:
    """Neither when modules are imported nor when their functions are called, nor for types only."""
    graph = {module.name: {*module.imports(module.run(functions))} & names() for module in modules()}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(f"import cycle: {' -> '.join(error.args[1])}")
    assert len(order) == len(names())


def test_packages_say_nothing() -> None:
    """What an __init__ imports comes with every module of its package, and makes cycles."""
    wrong = [
        module.name
        for module in modules()
        if module.path.name == "__init__.py"
        and not all(isinstance(node, ast.Expr) and module.lines == 1 for node in module.tree.body)
    ]
    assert wrong == []


def assert_inside_none(is_wrong: Callable[[ast.AST], bool]) -> None:
    inner = [one for one in modules() if one.path.name != "__main__.py" and one.package() not in ANYTHING]
    wrong = [f"{one.path.relative_to(ROOT)}:{node.lineno}" for one in inner for node in one.nodes if is_wrong(node)]
    assert not wrong, "\n".join(wrong)


def test_environment_is_read_at_the_edge_only() -> None:
    """In `__main__` modules, in the command line and in the benches. Passing `os.environ` on to a child is fine
    there.
    """

    def reads(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and node.attr in ENVIRONMENT and ast.unparse(node.value) == "os"

    assert_inside_none(reads)


def test_no_print_outside_command_line_and_benches() -> None:
    assert_inside_none(lambda node: isinstance(node, ast.Call) and ast.unparse(node.func) == "print")


def test_nothing_that_came_over_a_network_is_unpickled() -> None:
    """Unpickling may run what was sent. torch's collectives of objects do it, and so do pyzmq's messages of objects."""
    loaders = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
    calls = re.compile(r"(all_)?gather_object|\w+_object_list|(send|recv)_pyobj|[Uu]npickler")
    found = set()
    for module in modules():
        if not module.name.startswith(ANYTHING[1:]):
            named = {node.attr for node in module.nodes if isinstance(node, ast.Attribute)}
            unsafe = any(isinstance(node, ast.keyword) and node.arg == "weights_only" for node in module.nodes)
            if unsafe or loaders & {*module.imports()} or any(map(calls.fullmatch, named)):
                found.add(module.name)
    assert found == {"millrace_serve.engine.start.compile_ahead"}, "which reads a pipe from its own parent"


def test_no_bare_except() -> None:
    wrong = [
        f"{module.path.relative_to(ROOT)}:{node.lineno}"
        for module in modules()
        for node in module.nodes
        if isinstance(node, ast.ExceptHandler) and node.type is None
    ]
    assert not wrong, "\n".join(wrong)


def test_files_are_short() -> None:
    long = {str(module.path.relative_to(ROOT)): module.lines for module in modules() if module.lines > MAX_FILE}
    assert long == {}, f"limit {MAX_FILE}"


def test_functions_are_short() -> None:
    long = {}
    for module in modules():
        for node in module.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = node.end_lineno - node.lineno + 1
                if length > MAX_FUNCTION:
                    long[f"{module.path.relative_to(ROOT)}:{node.name}"] = length
    assert long == {}, f"limit {MAX_FUNCTION}"


def test_names_of_classes_are_unique_in_the_product() -> None:
    """A class name says what the class is without its module."""
    found = collections.defaultdict(list)
    for module in modules():
        if not module.name.startswith(ANYTHING[1:]):
            for node in module.nodes:
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(module.name)
    assert {name: where for name, where in found.items() if len(where) > 1} == {}


def test_any_and_ignored_types_have_a_reason() -> None:
    """In a comment on their line, or on the one above. An alias of Any has it once for all its uses."""
    wrong = []
    for module in modules():
        lines = [] if module.name.startswith(ANYTHING[1:]) else module.path.read_text().splitlines()
        anything = {node.lineno - 1 for node in module.nodes if isinstance(node, ast.Name) and node.id == "Any"}
        for index, line in enumerate(lines):
            _, ignored, more = line.partition("# type: ignore[")
            alone = "#" not in more if ignored else index in anything and "#" not in line
            if alone and not lines[index - 1].lstrip().startswith("#"):
                wrong.append(f"{module.path.relative_to(ROOT)}:{index + 1}: {line.strip()}")
    assert not wrong, "\n".join(wrong)


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
