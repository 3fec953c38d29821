"""One implementation of an op against its reference, on equal inputs."""

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from millrace_kernels.backend import forced
from millrace_kernels.fp8 import Fp8
from millrace_kernels.testing.tolerances import dequantised
from torch import Tensor

from millrace_testing.tolerances import assert_close

Tolerances = dict[torch.dtype, float]


def public(op: str) -> Callable[..., Any]:
    """`module.function` of millrace_kernels"""
    module, function = op.split(".")
    found: Callable[..., Any] = getattr(importlib.import_module(f"millrace_kernels.{module}"), function)
    return found


def assert_like_reference(
    op: str, target: str, make: Callable[[], dict[str, Any]], tolerances: Tolerances, changed: tuple[str, ...] = ()
) -> None:
    """Calls the op with two makes of its inputs and compares all results, and the inputs that it changes in place.

    `make` gives the same inputs each time. The reference gets what is BF16 in float32, so its own rounding does not
    count. `tolerances` are by the dtype of what the implementation gives.
    """
    given, wanted_given = make(), {name: _widened(value) for name, value in make().items()}
    with forced(**{op: target}):
        found = public(op)(**given)
    with forced(**{op: ""}):
        wanted = public(op)(**wanted_given)
    for actual, expected in zip(_tensors(found), _tensors(wanted), strict=True):
        assert_close(actual, expected.float(), tolerances[actual.dtype])
    for name in changed:
        actual, expected = given[name], wanted_given[name].float()
        assert torch.equal(actual.isnan(), expected.isnan()), f"{name}: other places were written"
        written = ~expected.isnan()
        assert_close(actual.float()[written], expected[written], tolerances[actual.dtype])


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Fp8):
        yield dequantised(value).to(torch.float32)
    elif isinstance(value, Tensor):
        yield value
    elif value is not None:
        for part in value:
            yield from _tensors(part)
