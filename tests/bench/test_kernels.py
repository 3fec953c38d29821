"""The kernel bench's arithmetic; that it runs is in test_records.py."""

from __future__ import annotations

import json
import math
import sys
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import millrace_bench.kernels.__main__ as kernels_main
import pytest
import torch
from millrace_bench.kernels import tune, tune_attention, tune_jobs, tune_mid, tune_moe, tune_rows, tuning
from millrace_bench.kernels.attention_inputs import Draw
from millrace_bench.kernels.case import Call, Case, candidates
from millrace_bench.kernels.driver import Row, as_dict, floor_us, line, measure, num_sets
from millrace_bench.kernels.moe import TP8_SHARED, Rank, draw_weights
from millrace_bench.kernels.numeric import FP8_EXPERTS_TOLERANCE
from millrace_bench.kernels.shapes import TINY
from millrace_bench.kernels.tune_jobs import Experts, Linear
from millrace_kernels import backend
from millrace_kernels.backend import Choice
from millrace_kernels.fp8 import BLOCK
from millrace_kernels.moe_experts import reference_experts
from millrace_kernels.triton import mla_absorb, mla_decode, quant, small_linear
from millrace_kernels.triton.moe_grouped import Launch
from millrace_testing import triton_interpreter
from torch import Tensor

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def case(nbytes: float = 4.8e6, flops: float = 0.0, math_: str = "bf16", **calls: Call) -> Case:
    return Case("op.op", "T=1", lambda: dict(calls), nbytes, flops, 2.5, "someone", math=math_)


def test_the_floor_is_the_slower_of_memory_and_math() -> None:
    assert floor_us(case(4.8e6)) == pytest.approx(1.0)
    assert floor_us(case(4.8e6, 1979e9, "fp8")) == pytest.approx(1000.0)
    assert floor_us(case(4.8e6, 989.5e9)) == pytest.approx(1000.0)


def test_inputs_rotate_through_more_than_the_l2_cache() -> None:
    assert num_sets(case(15e6), CUDA, quick=False) * 15e6 > 2 * 60e6
    assert num_sets(case(1.4e9), CUDA, quick=False) == 1
    assert num_sets(case(10.0), CUDA, quick=False) == 48
    assert num_sets(case(15e6), CUDA, quick=True) == num_sets(case(15e6), CPU, quick=False) == 1


def test_every_implementation_is_a_row_and_a_failing_one_says_why() -> None:
    def broken() -> None:
        raise RuntimeError("no kernel image")

    good, bad = measure(case(ours=lambda: torch.ones(64).sum(), theirs=broken), CPU, quick=True)
    assert (good.impl, good.error) == ("ours", "") and good.us > 0 and math.isnan(good.roofline)
    assert good.gb_per_s == pytest.approx(4.8e6 / good.us / 1e3)
    assert (bad.impl, bad.error) == ("theirs", "RuntimeError: no kernel image") and math.isnan(bad.us)
    assert "no kernel image" in line(bad) and f"{good.us:.1f}" in line(good)


def test_inputs_that_do_not_fit_are_a_row_and_the_next_case_runs() -> None:
    def no_room() -> dict[str, Call]:
        raise MemoryError("no room")

    (row,) = measure(replace(case(), make=no_room), CPU)
    assert (row.impl, row.error) == ("inputs", "MemoryError: no room")


def test_the_record_is_written_as_it_grows_and_says_what_the_time_did_not_reach(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, clock = tmp_path / "kernels.json", iter((0.0, 5.0, 11.0))
    written: list[int] = []

    def found(groups: list[str], op: str, device: torch.device) -> Iterator[Case]:
        yield case(ours=lambda: 1)
        written.append(len(json.loads(out.read_text())["results"]["rows"]))
        yield replace(case(ours=lambda: 1), shape="T=2")

    monkeypatch.setattr(kernels_main, "cases", found)
    monkeypatch.setattr(kernels_main, "time", types.SimpleNamespace(monotonic=lambda: next(clock)))
    monkeypatch.setattr(sys, "argv", ["kernels", "--device", "cpu", "--quick", "--seconds", "10", "--out", str(out)])
    kernels_main.main()
    results = json.loads(out.read_text())["results"]
    assert written == [1] and len(results["rows"]) == 1 and results["left_out"] == ["op.op T=2"]


def test_a_row_leaves_out_what_is_empty() -> None:
    row = as_dict(Row("op.op", "T=1", "ours", 12.34567, 1.0, 2.0, 0.5))
    assert row == {
        "op": "op.op", "shape": "T=1", "impl": "ours", "us": 12.35, "gb_per_s": 1.0, "tflops": 2.0, "roofline": 0.5
    }  # fmt: skip


def test_without_rows_the_candidate_is_the_reference() -> None:
    assert candidates("linear.linear", lambda: 7, CPU)["ref"]() == 7


def test_two_candidates_of_a_module_are_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(Choice(f"millrace_kernels.triton.mla_absorb:{name}") for name in ("absorb_q_small", "absorb_q_many"))
    monkeypatch.setattr(backend, "choices", lambda op, device: rows)
    assert list(candidates("mla_absorb.absorb_q", lambda: 7, CPU)) == [
        "triton.mla_absorb", "triton.mla_absorb:absorb_q_many"
    ]  # fmt: skip


def test_tuning_offers_configurations_of_every_shape() -> None:
    wanted = list(tune.jobs())
    assert len(set(wanted)) == len(wanted) > 26
    for job in wanted:
        options = job.options()
        assert len(options) == len(set(options)) > 2
        assert all(BLOCK % option.block_n == 0 for option in options)
        if isinstance(job, Linear):
            assert options[0] == small_linear.config(job.num, job.n, job.k)


@pytest.mark.long
def test_tuning_measures_what_gives_the_right_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    triton_interpreter.install()
    small = replace(TP8_SHARED, dims=replace(TINY, top_k=2), held=TINY.experts + 1, size=128)
    monkeypatch.setattr(tune_jobs, "TP8_SHARED", small)
    for module in (tune, tune_jobs):
        monkeypatch.setattr(module, "CUDA", CPU)
    monkeypatch.setattr(tuning, "time_us", lambda calls, *_: float(len(calls[-1]())))
    monkeypatch.setattr(tune_jobs, "MOST_SETS", 2)
    for job in (Linear(1, 256, 512), Linear(4, 128, 384), Experts(1, True), Experts(4, False)):
        few = job.options()[:2]
        with monkeypatch.context() as patch:
            patch.setattr(type(job), "options", lambda self, few=few: few)
            times = tune.tune(job, {job.key(option) for option in few}, lambda: False)
            assert list(times) == few and tune.row(job, times)["used"] == repr(few[0])
    assert "TB/s" in capsys.readouterr().out


def test_options_that_fail_or_give_a_wrong_result_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def calls(option: float) -> list[Call]:
        if option == 3.0:
            raise RuntimeError("too much shared memory")
        return [lambda: torch.full((4,), option)]

    over = iter((False, False, False, True))
    times = tuning.times_of(
        "op", (1.0, 2.0, 3.0, 1.001), calls, CPU, wanted=torch.ones(4), same=0.01, is_over=lambda: next(over)
    )
    assert list(times) == [1.0] and times[1.0] > 0
    said = capsys.readouterr().out
    assert "op: 2.0: AssertionError: differs from the reference by 1.0e+00" in said
    assert "op: 3.0: RuntimeError: too much shared memory" in said


def test_a_run_of_a_tuner_writes_what_the_time_reached(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def row(job: str) -> tuning.Row | None:
        if job == "broken":
            raise RuntimeError("out of memory")
        if job == "slow":
            args.seconds = -1.0
        return {"job": job} if job != "empty" else None

    args = tuning.parser("Tune.", 60.0).parse_args(["--out", str(tmp_path / "rows.json")])
    run = tuning.Run("tune", args)
    run.measure(["first", "broken", "empty", "slow", "late"], row)
    assert json.loads((tmp_path / "rows.json").read_text())["results"]["rows"] == [{"job": "first"}, {"job": "slow"}]
    said = capsys.readouterr().out
    assert "broken: RuntimeError: out of memory" in said and "no time left for late" in said and run.is_over


def test_attention_is_tuned_against_what_is_in_use() -> None:
    found = list(tune_attention.tasks(Draw(dtype=torch.bfloat16)))
    assert {task.op for task in found} == {
        "absorb_q", "project_v", "absorb_q of many", "project_v_quant", "mla_decode", "mla_prefill"
    }  # fmt: skip
    for task in found:
        assert len({str(option) for option in task.options}) == len(task.options) > 3
        if task.op == "mla_decode":
            assert task.options[0] == {"chosen": mla_decode.config(int(task.shape[2:5]), torch.bfloat16)}
        if task.op == "absorb_q":
            heads = int(task.shape.rpartition("=")[2])
            assert task.options[0] == {"tile": mla_absorb.Tile(mla_absorb.columns(heads, 512, 32))}


@pytest.mark.parametrize("num", tune_mid.TOKENS)
@pytest.mark.parametrize(("n", "k"), tune_mid.SHAPES)
def test_products_are_cut_so_that_every_part_has_work_and_every_sm_too(num: int, n: int, k: int) -> None:
    found = list(tune_mid.candidates(num, n, k))
    assert len(found) == len(set(found)) and {config.joined for config in found if config.splits == 1} <= {True}
    for config in found:
        assert config.splits * 3 <= k // 128 and config.block_n in (64, 128, 256)
        assert config.stages * (config.block_m + config.block_n) * 128 < 220_000, "more than an SM's shared memory"
    programs = [-(-num // c.block_m) * -(-n // c.block_n) * c.splits for c in found]
    assert max(programs) >= 132 or k < 2048


class Products(types.ModuleType):
    """DeepGEMM's part of the experts, by the reference."""

    def __init__(self) -> None:
        super().__init__("deep_gemm_grouped")
        self.moe_experts_fp8 = self._by_the_reference

    @staticmethod
    def _by_the_reference(*arguments: Any, shared_expert: bool, num_experts: int = 0) -> Tensor:
        return reference_experts(*arguments, shared_expert)


@pytest.mark.long
def test_the_experts_are_tuned_launch_by_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    triton_interpreter.install()
    monkeypatch.setattr(tune_moe, "CUDA", CPU)
    monkeypatch.setattr(tune_moe, "SAME", FP8_EXPERTS_TOLERANCE)
    monkeypatch.setattr(tune_moe, "quant_groups", quant.quant_groups)
    monkeypatch.setattr(tune_moe, "deep_gemm_grouped", Products())
    monkeypatch.setattr(tune_moe, "UPS", (Launch(4, 2, left=True), Launch(4, 3)))
    monkeypatch.setattr(tune_moe, "DOWNS", (Launch(4, 2, 64), Launch(4, 3, left=True)))
    monkeypatch.setattr(tuning, "time_us", lambda calls, *_: float(calls[-1]() is not None))
    rank = Rank("tiny", replace(TINY, top_k=2), TINY.experts + 1, 128, shared=True, folded=True)
    job, generator = tune_moe.Job(rank, 3), torch.Generator().manual_seed(0)
    monkeypatch.setattr(tune_moe, "heights", lambda rows: (32,))
    routings = [rank.choose(3, CPU, generator, 0.0) for _ in range(2)]
    plans = tune_moe.Plans(job, routings, *draw_weights(rank.held, rank.dims.hidden, rank.size, CPU))
    times = tune_moe.tune(plans, set(job.kernels()), lambda: False)
    row = tune_moe.report(job, times)
    assert len(row["up"]) == len(row["down"]) == 2, capsys.readouterr().out
    assert [name for name, us in row["op"]] == ["packed", "grouped, in use", "small", str(next(reversed(times["op"])))]
    assert f"slower: (1, {rank.held}, 128): Config(block_m=32" in capsys.readouterr().out


@pytest.mark.parametrize("job", tune_moe.jobs([rank.name for rank in tune_moe.SIZES]), ids=str)
def test_every_size_has_configurations_of_both_operand_orders(job: tune_moe.Job) -> None:
    kernels = list(job.kernels())
    assert len(kernels) == len(set(kernels))
    for up in (True, False):
        assert {launch.left for _, _, which, launch in kernels if which == up} == {True, False}
    assert {16: 16, 32: 32, 64: 64}.get(job.rows, 16) in {block_m for _, block_m, _, _ in kernels}


def test_kernels_that_move_rows_are_tuned_beside_the_tiles_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_interpreter.install()
    monkeypatch.setattr(tune_rows, "CUDA", CPU)
    monkeypatch.setattr(tune_rows, "HEADS", 2)
    monkeypatch.setattr(tuning, "time_us", lambda calls, *_: float(calls[0]() is None))
    rank = Rank("tiny", replace(TINY, top_k=2), TINY.experts + 1, 128, shared=True, folded=True)
    found = list(tune_rows.tasks(18, rank))
    assert len({task.op for task in found}) == len(found) == 8
    for task in found:
        assert len(task.others) > 3 and all(len(option) == len(task.used) for option in task.others)
        assert set(tune_rows.tune(replace(task, others=()))) == {task.used}
