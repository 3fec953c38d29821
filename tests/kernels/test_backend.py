from __future__ import annotations

import logging

import pytest
import torch
from millrace_kernels import backend, gpu
from millrace_kernels.backend import REFERENCE, Choice, forced, implementation
from millrace_kernels.triton import fp8_linear

OP = "kv_gather.kv_gather"
CPU = torch.device("cpu")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """A device that the table takes for an sm90."""
    monkeypatch.setattr(backend, "capability", lambda device: "sm90")
    monkeypatch.setattr(backend, "TABLE", dict(backend.TABLE))
    backend._available.cache_clear()
    backend._has.cache_clear()
    yield torch.device("cuda")
    backend._available.cache_clear()
    backend._has.cache_clear()


def test_an_op_without_a_row_runs_its_reference(on_gpu: torch.device) -> None:
    backend.TABLE[OP] = ()
    assert implementation(OP, CPU) is None
    assert implementation(OP, on_gpu) is None


def test_the_first_row_that_serves_the_size_wins(on_gpu: torch.device) -> None:
    backend.TABLE[OP] = (
        Choice("math:hypot", max_size=16),
        Choice("math:pow", min_size=64, capability="sm100"),
        Choice("math:fmod", min_size=64),
    )
    assert implementation(OP, on_gpu, 16)(3, 4) == 5
    assert implementation(OP, on_gpu, 17) is None
    assert implementation(OP, on_gpu, 64)(7, 4) == 3
    assert implementation(OP, CPU, 16) is None


def test_a_row_may_ask_for_more_than_the_size(on_gpu: torch.device) -> None:
    backend.TABLE[OP] = (
        Choice("math:hypot", when="operator:eq"),
        Choice("math:fmod", when="operator:ne"),
    )
    assert implementation(OP, on_gpu, 16, (3, 4))(7, 4) == 3


def test_a_missing_library_is_named_and_skipped(on_gpu: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    backend.TABLE[OP] = (Choice("math:hypot", needs="no_such_library"), Choice("math:fmod"))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert implementation(OP, on_gpu, 1)(7, 4) == 3
    assert [record.getMessage().split()[0] for record in caplog.records] == ["no_such_library"]


def test_forced_for_a_comparison() -> None:
    with forced(**{OP: "math:hypot"}):
        assert implementation(OP, CPU)(3, 4) == 5
        with forced(**{OP: ""}):
            assert implementation(OP, CPU) is None
    assert implementation(OP, CPU) is None


@pytest.mark.parametrize("op", ["moe_experts", "moe_experts_fp8", "moe_experts_other"])
def test_experts_never_run_their_reference_on_a_gpu(op: str) -> None:
    """It sorts the choices on the host, which a graph cannot hold: the last row serves what the others do not."""
    last = backend.TABLE[f"moe_experts.{op}"][-1]
    assert last is not REFERENCE and last.needs in ("", "triton") and last.serves(0, ()) and last.serves(1 << 40, ())


def test_every_row_names_a_function() -> None:
    for op, choices in backend.TABLE.items():
        assert op.count(".") == 1 and choices
        for choice in choices:
            assert choice is REFERENCE or choice.target.count(":") == 1
            assert choice.min_size <= choice.max_size


def test_measured_tables_hold_for_gpus_as_wide_as_the_one_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    key = next(iter(fp8_linear.MEASURED))
    tokens, n, k = key
    assert fp8_linear.is_measured(tokens, (n, k)) and fp8_linear.config(*key) == fp8_linear.MEASURED[key]
    monkeypatch.setattr(gpu, "sms", lambda: 78)
    assert not fp8_linear.is_measured(tokens, (n, k)) and gpu.measured({1: 2}, 1) is None
    monkeypatch.setattr(fp8_linear, "sms", lambda: 78)
    narrow = fp8_linear.config(128, 2112, 7168)
    monkeypatch.setattr(fp8_linear, "sms", lambda: 132)
    assert 1 < narrow.splits < fp8_linear.config(128, 2112, 7168).splits
