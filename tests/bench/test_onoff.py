"""With an optimisation and without it the results are the same; kernels run in Triton's interpreter."""

import json
import math
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from millrace_bench import engine_model, onoff, onoff_steps
from millrace_bench.figures import said
from millrace_bench.onoff import PAIRS
from millrace_bench.onoff_pairs import SMALL, Pair
from millrace_bench.onoff_steps import STEPS
from millrace_kernels import scratch
from millrace_kernels.backend import forced
from millrace_kernels.fp8 import quant_groups
from millrace_testing import triton_interpreter

triton_interpreter.install()

CPU = torch.device("cpu")
OURS = {
    "moe_gate.moe_gate": "moe_gate:moe_gate",
    "mla_absorb.absorb_q": "mla_absorb:absorb_q",
    "mla_decode.mla_decode": "mla_decode:mla_decode",
    "merge_state.merge_state": "merge_state:merge_state",
    "silu_mul.silu_mul": "quant:silu_mul",
    "mla_qkv.mla_qkv_norm": "mla_qkv:mla_qkv_norm",
    "rms_norm.rms_norm": "rms_norm:rms_norm",
    "fp8.quant_groups": "quant:quant_groups",
    "fp8.fp8_linear": "fp8_linear:fp8_linear",
    "fp8.small_linear": "small_linear:small_linear",
}
ROUNDING = {"A13": 1e-2, "X8": 1e-1}  # of forms of attention in BF16, of the FP8 rows and experts behind them
KERNELS = {op: f"millrace_kernels.triton.{target}" for op, target in OURS.items()}


@pytest.mark.parametrize("seed", PAIRS)
def test_results_are_the_same_with_and_without(seed: str) -> None:
    torch.manual_seed(0)
    pairs = list(PAIRS[seed](SMALL, CPU))
    assert pairs and all(pair.seed == seed for pair in pairs)
    with forced(**KERNELS):
        for pair in pairs:
            assert pair.difference(*pair.make()) <= pair.tolerance, pair.shape


def test_other_results_are_a_difference() -> None:
    one, two = torch.ones(3), torch.tensor([1.0, 1.0, 2.0])
    pair = Pair("A5", "T=1", lambda: (lambda: (one, one), lambda: (one, two)), 1.0)
    assert pair.difference(*pair.make()) == pytest.approx(1 / 6**0.5)
    none = torch.tensor([1.0, 1.0, -torch.inf])
    assert pair.difference(lambda: (none,), lambda: (one,)) == math.inf
    assert pair.difference(lambda: (none,), lambda: (none,)) == 0.0


def test_scales_that_are_transposed_were_written_by_rows() -> None:
    """Otherwise the copy of G8 would be one of equal layouts."""
    with forced(**KERNELS):
        scales = quant_groups(torch.randn(20, 256).bfloat16()).scales
    assert scales.stride(0) == 1 and scales.contiguous().stride(0) == 2


@pytest.mark.parametrize("seed", STEPS)
def test_steps_run_with_and_without(seed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    overlapped: list[bool] = []
    load_rank = engine_model.load_rank

    def load(limits: Any, *args: Any, **options: Any) -> Any:
        overlapped.append(limits.overlap)
        return load_rank(limits, *args, **options)

    monkeypatch.setattr(engine_model, "load_rank", load)
    for shape, on_us, off_us, error in STEPS[seed](CPU, True, 2):
        assert shape and on_us > 0 and off_us > 0 and error <= ROUNDING.get(seed, 0.0)
    assert overlapped == ([True, False] if seed == "X3" else [])


def test_a_step_without_scratch_memory_gets_zeros_from_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = onoff_steps._rank(CPU, tiny=True, layers=2)
    steps: list[torch.Tensor] = []
    take = Mock(wraps=model.scratch.take)

    def step() -> torch.Tensor:
        with model.scratch.step():
            steps.append(scratch.zeros(4, CPU))
        return steps[-1]

    monkeypatch.setattr(model.scratch, "take", take)
    (_, on), (_, off) = onoff_steps._replays(model, step, CPU)
    assert on.tolist() == off.tolist() == [0] * 4
    assert take.call_count == len(steps) / 2 > 0
    step()
    assert take.call_count == (len(steps) + 1) / 2, "afterwards the model has its scratch memory again"


def test_the_bench_goes_on_behind_a_row_that_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(PAIRS, "M2", Mock(side_effect=RuntimeError("no kernel image")))
    monkeypatch.setattr("sys.argv", ["onoff", "M2", "A11", "--tiny"])
    onoff.main()
    failed, found = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]["rows"]
    assert failed == {"seed": "M2", "failed": "RuntimeError: no kernel image"}
    assert found["seed"] == "A11" and found["gain"] == pytest.approx(found["off_us"] / found["on_us"], rel=1e-3)
    more = found | {"gain": found["gain"] + 1}  # measured on a busy machine, it may be anything
    assert said("onoff", {"rows": [failed, more, found]}) == (
        f"A11 x{found['gain']:.2f} to x{more['gain']:.2f}, M2 RuntimeError: no kernel image"
    )


def test_an_unknown_row_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.argv", ["onoff", "M2", "Z9", "--tiny"])
    with pytest.raises(SystemExit):
        onoff.main()
    assert "Z9: choose from A6 G8" in capsys.readouterr().err
