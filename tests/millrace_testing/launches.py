"""Which variants of our Triton kernels an engine on a CPU would launch on an H200 without other libraries.

Triton compiles a kernel for every combination of constants, dtypes and kinds of arguments: an integer may be 1 or a
multiple of 16, an address a multiple of 16 bytes. Here an op calls its Triton implementation, whose launches are noted
and do nothing, and then its reference, whose result counts.
"""

import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from millrace_kernels import backend

Variant = tuple[str, tuple[Any, ...]]  # a kernel; name and kind of every argument, and its options
ON = "sm90"


@contextlib.contextmanager
def noted() -> Iterator[set[Variant]]:
    """The set grows in the context. Needs Triton's interpreter."""
    from triton.runtime.interpreter import InterpretedFunction

    found: set[Variant] = set()
    plain = threading.local()  # .now: references run

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        found.add((f"{kernel.fn.__module__}.{kernel.fn.__name__}", _kinds(kernel, args, options)))

    def implementation(
        op: str, device: torch.device, size: int = 0, shape: tuple[int, ...] = ()
    ) -> Callable[..., Any] | None:
        rows = [] if getattr(plain, "now", False) else backend._available(op, ON)
        target = next((row.target for row in rows if row.serves(size, shape)), "")
        return with_reference(backend._load(target)) if ".triton." in target else None

    def with_reference(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **options: Any) -> Any:
            function(*args, **options)
            op = sys._getframe(1)  # its arguments are not those of `function`
            names = op.f_code.co_varnames[: op.f_code.co_argcount + op.f_code.co_kwonlyargcount]
            given = [op.f_locals[name] for name in names]
            positional = op.f_code.co_argcount
            plain.now = True
            try:
                keywords = dict(zip(names[positional:], given[positional:], strict=True))
                return op.f_globals[op.f_code.co_name](*given[:positional], **keywords)
            finally:
                plain.now = False

        return run

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(InterpretedFunction, "run", note))
        for op in backend.TABLE:
            module = importlib.import_module(f"millrace_kernels.{op.split('.')[0]}")
            stack.enter_context(mock.patch.object(module, "implementation", implementation))
        yield found


def _kinds(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> tuple[Any, ...]:
    """As triton.runtime.jit forms its keys."""
    from triton._C.libtriton import native_specialize_impl
    from triton.backends.compiler import BaseBackend

    plain, any_address = (
        set(kernel.kwargs.get(name) or ()) for name in ("do_not_specialize", "do_not_specialize_on_alignment")
    )
    kinds = []
    given = dict(zip(kernel.arg_names, args, strict=False)) | options
    for name, value in given.items():
        constant = name not in kernel.arg_names or "constexpr" in str(kernel.fn.__annotations__.get(name))
        if not constant:
            value = native_specialize_impl(BaseBackend, value, False, name not in plain, name not in any_address)
        kinds.append((name, value))
    return tuple(kinds)


def differences(before: set[Variant], after: set[Variant]) -> list[str]:
    """How each new variant differs from the nearest one of its kernel."""
    found = []
    for kernel, kinds in sorted(after - before, key=str):
        others = [[(a, b) for a, b in zip(old, kinds, strict=True) if a != b] for name, old in before if name == kernel]
        found.append(f"{kernel}: {min(others, key=len, default='the first of its kernel')}")
    return found
