from __future__ import annotations

import pytest
import torch
from millrace_kernels import backend
from millrace_kernels.ref.rope import rope


def test_an_op_without_an_entry_runs_its_reference() -> None:
    assert backend.implementation("rope.rope", torch.device("cpu")) is rope


def test_an_entry_wins_for_its_capability_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backend.TABLE, ("rope.rope", "cpu"), "math:hypot")
    monkeypatch.setitem(backend.TABLE, ("silu_mul.silu_mul", "sm90"), "math:hypot")
    backend.implementation.cache_clear()
    try:
        assert backend.implementation("rope.rope", torch.device("cpu"))(3, 4) == 5
        assert (
            backend.implementation("silu_mul.silu_mul", torch.device("cpu")).__module__
            == "millrace_kernels.ref.silu_mul"
        )
    finally:
        backend.implementation.cache_clear()


def test_every_entry_can_be_resolved() -> None:
    for (op, _), target in backend.TABLE.items():
        assert op.count(".") == 1 and target.count(":") == 1
