import logging
import sys
import types
from collections.abc import Iterator

import pytest
import torch
from millrace_kernels import backend
from millrace_kernels.backend import REFERENCE, KernelChoice, choices, forced, implementation, prefer

OP = "kv_gather.kv_gather"
CPU = torch.device("cpu")


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device that the table takes for an sm90."""
    yield from pretend(monkeypatch, "sm90")


@pytest.fixture
def on_other_gpu(monkeypatch: pytest.MonkeyPatch, capability: str) -> Iterator[torch.device]:
    """A device of the test's parameter `capability`."""
    yield from pretend(monkeypatch, capability)


def pretend(monkeypatch: pytest.MonkeyPatch, capability: str) -> Iterator[torch.device]:
    monkeypatch.setattr(backend, "capability", lambda device: capability)
    monkeypatch.setattr(backend, "TABLE", dict(backend.TABLE))
    backend._available.cache_clear()
    backend._has.cache_clear()
    yield torch.device("cuda")
    backend._available.cache_clear()
    backend._has.cache_clear()


def test_op_without_a_row_runs_its_reference(on_gpu: torch.device) -> None:
    backend.TABLE[OP] = ()
    assert implementation(OP, CPU) is None
    assert implementation(OP, on_gpu) is None


def test_first_row_that_serves_the_size_wins(on_gpu: torch.device) -> None:
    backend.TABLE[OP] = (
        KernelChoice("math:hypot", max_size=16),
        KernelChoice("math:pow", min_size=64, capability="sm100"),
        KernelChoice("math:fmod", min_size=64),
    )
    assert implementation(OP, on_gpu, 16)(3, 4) == 5
    assert implementation(OP, on_gpu, 17) is None
    assert implementation(OP, on_gpu, 64)(7, 4) == 3
    assert implementation(OP, CPU, 16) is None


def test_row_may_ask_for_more_than_the_size(on_gpu: torch.device) -> None:
    backend.TABLE[OP] = (
        KernelChoice("math:hypot", when="operator:eq"),
        KernelChoice("math:fmod", when="operator:ne"),
    )
    assert implementation(OP, on_gpu, 16, (3, 4))(7, 4) == 3


def test_missing_library_is_named_and_skipped(on_gpu: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    backend.TABLE[OP] = (KernelChoice("math:hypot", needs="no_such_library"), KernelChoice("math:fmod"))
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


@pytest.fixture
def libraries(on_gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """A device with libraries for attention, as far as they are imported."""
    for name in ("flash_mla", "flashinfer"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    yield on_gpu
    prefer((), CPU)


@pytest.mark.parametrize(
    ("wanted", "decode", "prompts", "plans"),
    [
        ((), "lib.flash_mla", "lib.flashinfer", (True, True)),
        (("flash_mla",), "lib.flash_mla", "lib.flashinfer", (True, True)),
        (("flashinfer", "triton"), "triton.mla_decode", "lib.flashinfer", (False, True)),
        (("flash_mla", "triton"), "lib.flash_mla", "triton.mla_prefill", (True, False)),
        (("triton", "flash_mla"), "triton.mla_decode", "triton.mla_prefill", (False, False)),
    ],
)
def test_libraries_of_attention(
    libraries: torch.device, wanted: tuple[str, ...], decode: str, prompts: str, plans: tuple[bool, bool]
) -> None:
    prefer(wanted, libraries)
    for phase, module, planned in (("mla_decode", decode, plans[0]), ("mla_prefill", prompts, plans[1])):
        run = implementation(f"{phase}.{phase}", libraries, 9)
        assert run is not None and run.__module__ == f"millrace_kernels.{module}"
        assert (implementation(f"{phase}.plan", libraries, 9) is not None) == planned
    with forced(**{"mla_decode.mla_decode": "math:hypot"}):
        assert implementation("mla_decode.mla_decode", libraries, 9)(3, 4) == 5, "a comparison is in the middle of it"


@pytest.mark.parametrize(("capability", "library"), [("sm100", "flash_mla"), ("sm80", "flashinfer"), ("cpu", "triton")])
def test_library_that_the_device_lacks_is_refused(on_other_gpu: torch.device, capability: str, library: str) -> None:
    with pytest.raises(ValueError, match=f"^attention={library}: not installed, or without a kernel for {capability}$"):
        prefer((library,), on_other_gpu)


@pytest.mark.parametrize("op", ["moe_experts", "moe_experts_fp8", "moe_experts_other"])
def test_experts_never_run_their_reference_on_a_gpu(op: str) -> None:
    """It sorts the choices on the host, which a graph cannot hold: the last row serves what the others do not."""
    last = backend.TABLE[f"moe_experts.{op}"][-1]
    assert last is not REFERENCE and last.needs in ("", "triton") and last.serves(0, ()) and last.serves(1 << 40, ())


def test_every_row_names_a_function() -> None:
    for op, rows in backend.TABLE.items():
        assert op.count(".") == 1 and rows
        for choice in rows:
            assert choice is REFERENCE or choice.target.count(":") == 1
            assert choice.min_size <= choice.max_size


def targets(op: str, device: torch.device) -> list[str]:
    return [choice.target for choice in choices(op, device)]


@pytest.mark.parametrize("capability", ["sm89", "sm90", "sm100", "sm120"])
def test_our_kernels_run_on_every_gpu_that_knows_e4m3(on_other_gpu: torch.device) -> None:
    for op, rows in backend.TABLE.items():
        ours = [row.target for row in rows if row.needs == "triton"]
        assert [target for target in targets(op, on_other_gpu) if ".triton." in target] == ours
    for op, num in (("rms_norm.rms_norm", 1), ("fp8.fp8_linear", 300), ("mla_decode.mla_decode", 8)):
        run = implementation(op, on_other_gpu, num, (256, 256))
        assert run is not None and run.__module__ == f"millrace_kernels.triton.{op.partition('.')[2]}"


@pytest.mark.parametrize("capability", ["sm80"])
def test_kernels_without_e4m3_run_on_older_gpus(on_other_gpu: torch.device) -> None:
    assert targets("moe_experts.moe_experts", on_other_gpu) and targets("mla_decode.mla_decode", on_other_gpu)
    assert targets("moe_gate.gate_logits", on_other_gpu)[-1] == "millrace_kernels.lib.cublas:gate_logits"
    for op in ("fp8.fp8_linear", "fp8.quant_groups", "fp8.small_linear", "moe_experts.moe_experts_fp8"):
        assert targets(op, on_other_gpu) == [] and implementation(op, on_other_gpu, 32, (256, 256, 128, 1)) is None


@pytest.mark.parametrize("capability", ["sm75"])
def test_where_triton_lacks_bf16_references_run(on_other_gpu: torch.device) -> None:
    assert not any(targets(op, on_other_gpu) for op in backend.TABLE)
