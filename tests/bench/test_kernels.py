"""The kernel bench's arithmetic; that it runs is in test_records.py."""

import ast
import json
import math
import subprocess
import sys
import types
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import millrace_bench.kernels.__main__ as kernels_main
import pytest
import torch
from millrace_bench.kernels import (
    tune,
    tune_attention,
    tune_few,
    tune_mid,
    tune_moe,
    tuned_file,
    tuning,
)
from millrace_bench.kernels.case import Call, Case, candidates
from millrace_bench.kernels.driver import floor_us, line, measure, num_sets
from millrace_bench.kernels.moe import Rank, draw_weights
from millrace_bench.kernels.tune_few import Linear
from millrace_bench.kernels.tuned_file import Entry
from millrace_bench.kernels.tuning import Clock, Found
from millrace_kernels import backend, tuned
from millrace_kernels.backend import KernelChoice
from millrace_kernels.fp8 import BLOCK, fp8_linear
from millrace_kernels.gpu import Gpu
from millrace_kernels.moe_experts import reference_experts
from millrace_kernels.testing.attention_inputs import Draw
from millrace_kernels.testing.shapes import TINY
from millrace_kernels.triton import moe_grouped, quant, small_linear
from millrace_kernels.triton.gemv import Gemv
from millrace_kernels.triton.moe_grouped import Launch
from millrace_testing import triton_interpreter
from millrace_testing.tolerances import FP8_EXPERTS_TOLERANCE
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


@pytest.mark.parametrize("before", ["", "Ninja build failed.\n[1/8] nvcc a.cu\n  error: "])
def test_every_implementation_is_a_row_and_a_failing_one_says_why(before: str) -> None:
    broken = Mock(side_effect=RuntimeError(f"{before}no kernel image"))
    good, bad = measure(case(ours=lambda: torch.ones(64).sum(), theirs=broken), CPU, quick=True)
    assert (good.impl, good.error) == ("ours", "") and good.us > 0 and math.isnan(good.roofline)
    assert good.gb_per_s == pytest.approx(4.8e6 / good.us / 1e3)
    error = "error: no kernel image" if before else "no kernel image"
    assert (bad.impl, bad.error) == ("theirs", f"RuntimeError: {error}") and math.isnan(bad.us)
    assert "no kernel image" in line(bad) and f"{good.us:.1f}" in line(good)


def test_inputs_that_do_not_fit_are_a_row_and_the_next_case_runs() -> None:
    (row,) = measure(replace(case(), make=Mock(side_effect=MemoryError("no room"))), CPU)
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


def test_two_candidates_of_a_module_are_two_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tuple(
        KernelChoice(f"millrace_kernels.triton.mla_absorb:{name}") for name in ("absorb_q_small", "absorb_q_many")
    )
    monkeypatch.setattr(backend, "choices", lambda op, device: rows)
    assert list(candidates("mla_absorb.absorb_q", lambda: 7, CPU)) == [
        "triton.mla_absorb", "triton.mla_absorb:absorb_q_many"
    ]  # fmt: skip


def test_tuning_offers_configurations_of_every_shape() -> None:
    wanted = list(tune_few.jobs())
    assert len(set(wanted)) == len(wanted) > 26
    for job in wanted:
        options = job.options()
        assert len(options) == len(set(options)) > 2
        assert all(BLOCK % option.block_n == 0 for option in options)
        assert options[0] == small_linear.config(job.num, job.n, job.k)


@pytest.mark.long
@pytest.mark.parametrize("job", [Linear(1, 256, 512), Linear(4, 128, 384)], ids=str)
def test_tuning_measures_what_gives_the_right_result(
    job: Linear, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    triton_interpreter.install()
    monkeypatch.setattr(tune_few, "CUDA", CPU)
    monkeypatch.setattr(tuning, "time_us", lambda calls, *_: float(len(calls[-1]())))
    monkeypatch.setattr(tune_few, "MOST_SETS", 2)
    used, *_, other = job.options()  # the last one has the fewest programs, each of which takes the interpreter long
    monkeypatch.setattr(type(job), "options", lambda self: [used, other])
    found = job.measure({key for key, _ in job.tasks()}, Clock(math.inf))
    assert found is not None and found.row["used"] == repr(used)
    assert [name for name, *_ in found.row["us_and_tb_per_s"]] == [repr(used), repr(other)]
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


@dataclass
class Fake:
    """A job without a GPU."""

    name: str
    found: Found | None = None
    ends: Clock | None = None

    def __str__(self) -> str:
        return self.name

    def tasks(self) -> Iterator[tuple[Hashable, Call]]:
        yield from ()

    def measure(self, ready: set[Hashable], clock: Clock) -> Found | None:
        if self.name == "broken":
            raise RuntimeError("out of memory")
        if self.ends:
            self.ends.seconds = -1.0
        return self.found


def test_a_run_keeps_what_the_time_reached(capsys: pytest.CaptureFixture[str]) -> None:
    first, slow, clock, kept = Found({"job": "first"}), Found({"job": "slow"}), Clock(60.0), list[Found]()
    jobs = [Fake("first", first), Fake("broken"), Fake("empty"), Fake("slow", slow, clock), Fake("late", first)]
    tuning.run(jobs, clock, 1, kept.append)
    assert kept == [first, slow]
    said = capsys.readouterr().out
    assert "broken: RuntimeError: out of memory" in said and "no time left for late" in said and clock.is_over


H20 = Gpu("NVIDIA H20", "sm90", 78)


@pytest.fixture
def fake_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kind of three jobs "fake", that measure nothing, on an H20."""
    found = [Found({"job": n}, (Entry("small_linear", (n, 1, 1), Gemv(n, 512, 1), float(n)),)) for n in (1, 2, 3)]
    module = types.ModuleType("millrace_bench.kernels.tune_fake")
    module.jobs = lambda: [Fake(f"job {one.row['job']}", one) for one in found]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(tune, "KINDS", {"fake": "tune_fake"})
    monkeypatch.setattr(tune, "gpu", lambda: H20)


def test_the_tuner_writes_the_file_of_its_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_kind: None) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    arguments = ["tune", "--all", "--match", "job", "--folder", str(tmp_path / "new"), "--out", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", arguments)
    tune.main()
    file = tuned.read(tuned_file.path_of(H20, tmp_path / "new"))
    rows = {tuple(row["key"]): row for row in file.tables["small_linear"]}
    assert file.gpu == H20 and rows[2, 1, 1]["config"] == Gemv(2, 512, 1)._asdict() and rows[3, 1, 1]["us"] == 3.0
    assert rows[1, 2112, 7168]["from"] == "NVIDIA H100 80GB HBM3", "what held before still does, and says from where"
    assert len(json.loads((tmp_path / "out").read_text())["results"]["rows"]) == 3


def test_gpus_share_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_kind: None) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(tune, "over_gpus", lambda task, gpus: [task(index) for index in range(gpus)])
    monkeypatch.setattr(sys, "argv", ["tune", "fake", "--folder", str(tmp_path)])
    shares = [tune.share(["fake"], "", 60.0, index, 2)[1] for index in range(2)]
    assert [[one.row["job"] for one in found] for found in shares] == [[1, 3], [2]]
    tune.main()
    keys = [row["key"] for row in tuned.read(tuned_file.path_of(H20, tmp_path)).tables["small_linear"]]
    assert [key for key in keys if key[1:] == [1, 1]] == [[1, 1, 1], [2, 1, 1], [3, 1, 1]]


TWO_TASKS = """
import ray
from millrace_bench.kernels import tune
print(tune.over_gpus(lambda index: (index, ray.get_gpu_ids()), 2))
"""


@pytest.mark.long
def test_every_gpu_has_a_task_of_its_own() -> None:
    """In a process of its own: Ray forks, and hung once where other threads were within gRPC."""
    command, late = [sys.executable, "-c", TWO_TASKS], "timed out during startup"  # after 30 s, by Ray's own limit
    while late in (result := subprocess.run(command, capture_output=True, text=True, check=False)).stderr:
        pass
    assert result.returncode == 0, result.stderr
    found = ast.literal_eval(result.stdout.splitlines()[-1])
    assert [index for index, _ in found] == [0, 1] and all(len(ids) == 1 for _, ids in found)


def test_attention_fills_its_tables() -> None:
    task = next(task for task in tune_attention.tasks(Draw(dtype=torch.bfloat16)) if task.key == (128, 16))
    none, *tiles = task.options
    times = {str(none): 9.0, **{str(option): 10.0 + n for n, option in enumerate(tiles)}}
    winner = next(option for option in tiles[3:] if option["fp8"])
    fp8, bf16 = tune_attention.entries(task, times | {str(winner): 5.0})
    assert (fp8.table, fp8.key, fp8.config, fp8.us) == ("absorb_q", (128, 16, 1), winner["tile"], 5.0)
    assert fp8.others_us == {"cublas": 9.0} and (bf16.key, bf16.config) == ((128, 16, 2), None)


def test_experts_fill_one_row_for_each_expected_number_of_rows() -> None:
    config, found = moe_grouped.MoeGroupedConfig(16, Launch(4, 3), Launch(4, 3)), dict[Any, Entry]()
    for job in tune_moe.jobs():
        for entry in tune_moe.entries_of(job, config, float(job.num), {}):
            assert entry.key not in found
            found[entry.key] = entry
    assert (found[1, 257, 256].us, found[1, 256, 256].copy_of) == (32.0, (1, 257, 256))
    assert found[32, 33, 2048].us == 128.0 and found[32, 32, 2048].us == 1024.0


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


def test_products_are_tuned_beside_deep_gemm(monkeypatch: pytest.MonkeyPatch) -> None:
    triton_interpreter.install()
    ours, us = tune_mid.Fp8LinearConfig(32, 64, 1, 4, 2), iter((30.0, 20.0, 10.0))
    monkeypatch.setattr(tune_mid, "CUDA", CPU)
    monkeypatch.setattr(tune_mid, "COLD_BYTES", 0)
    monkeypatch.setattr(tune_mid, "STEP", 2)
    monkeypatch.setattr(tune_mid, "candidates", lambda *shape: [ours, ours._replace(stages=3)])
    monkeypatch.setattr(tune_mid.deep_gemm, "fp8_linear", fp8_linear)
    monkeypatch.setattr(tuning, "time_us", lambda calls, *_: (calls[0](), next(us))[1])
    job = tune_mid.Product(32, 128, 256)
    row, (entry,) = job.measure({key for key, _ in job.tasks()}, Clock(60.0))
    assert (entry.table, entry.key, entry.config) == ("fp8_linear", (32, 128, 256), ours._replace(stages=3))
    assert entry.us == 5.0 and entry.others_us == {"deep_gemm": 15.0} and len(row["times"]) == 2


def experts_by_the_reference(*arguments: Any, shared_expert: bool, num_experts: int = 0) -> Tensor:
    return reference_experts(*arguments, shared_expert)


@pytest.mark.long
def test_the_experts_are_tuned_launch_by_launch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    triton_interpreter.install()
    monkeypatch.setattr(tune_moe, "CUDA", CPU)
    monkeypatch.setattr(tune_moe, "SAME", FP8_EXPERTS_TOLERANCE)
    monkeypatch.setattr(tune_moe, "quant_groups", quant.quant_groups)
    library = types.SimpleNamespace(moe_experts_fp8=experts_by_the_reference)  # in the place of DeepGEMM
    monkeypatch.setattr(tune_moe, "deep_gemm_grouped", library)
    monkeypatch.setattr(tune_moe, "UPS", (Launch(4, 2, left=True), Launch(4, 3)))
    monkeypatch.setattr(tune_moe, "DOWNS", (Launch(4, 2, 64), Launch(4, 3, left=True)))
    monkeypatch.setattr(tuning, "time_us", lambda calls, *_: float(calls[-1]() is not None))
    rank = Rank("tiny", replace(TINY, top_k=2), TINY.experts + 1, 128, shared=True, folded=True)
    job, generator = tune_moe.Job(rank, 3), torch.Generator().manual_seed(0)
    monkeypatch.setattr(tune_moe, "heights", lambda rows: (32,))
    routings = [rank.choose(3, CPU, generator, 0.0) for _ in range(2)]
    plans = tune_moe.Plans(job, routings, *draw_weights(rank.held, rank.dims.hidden, rank.size, CPU))
    times = tune_moe.tune(plans, set(job.kernels()), lambda: False)
    row = tune_moe.report(job, times).row
    assert len(row["up"]) == len(row["down"]) == 2, capsys.readouterr().out
    assert [name for name, us in row["op"]] == ["packed", "grouped, in use", "small", str(next(reversed(times["op"])))]
    assert "slower: 1.0 us with MoeGroupedConfig(block_m=32" in capsys.readouterr().out


@pytest.mark.parametrize("job", tune_moe.jobs(), ids=str)
def test_every_size_has_configurations_of_both_operand_orders(job: tune_moe.Job) -> None:
    kernels = list(job.kernels())
    assert len(kernels) == len(set(kernels))
    for up in (True, False):
        assert {launch.left for _, _, which, launch in kernels if which == up} == {True, False}
    assert {16: 16, 32: 32, 64: 64}.get(job.rows, 16) in {block_m for _, block_m, _, _ in kernels}
