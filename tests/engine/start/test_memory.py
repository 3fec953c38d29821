"""The memory plan: what fits is used, what does not fit is refused with the numbers and what to change."""

from pathlib import Path

import pytest
import torch
from millrace_bench import v3
from millrace_common.config import OverCommitted
from millrace_serve.engine.config import GIB, Execution, Limits, Role
from millrace_serve.engine.start.activations import activation_bytes
from millrace_serve.engine.start.memory import MIB, Demand, Memory, MemoryPlan, host_memory, make_plan
from millrace_serve.engine.start.startup import RankSetup, estimated, kv_layout
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.parallel import ParallelDims

H200 = Memory(total=140 * GIB, free=139 * GIB)
DEMAND = Demand(weights=100 * GIB, activations=6 * GIB, graphs=2 * GIB, libraries=1 * GIB)
PAGE = 4 * MIB
V3, ALONE = ModelConfig(num_hidden_layers=30, **{**v3.V3, **v3.WIDTHS["e32"]}), ParallelDims()


def limits(num_pages: int | str = "auto", **changes: int) -> Limits:
    return Limits.model_validate({"num_pages": num_pages, "max_model_len": 65536, "max_running": 256, **changes})


def plan(num_pages: int | str = "auto", used: Memory = H200, fraction: float = 0.9, **changes: int) -> MemoryPlan:
    return make_plan(limits(num_pages, **changes), used, fraction, DEMAND, PAGE)


def test_pages_fill_what_is_left() -> None:
    one = plan()
    assert one.budget == 126 * GIB
    assert one.num_pages == 17 * GIB // PAGE  # 126 - 100 - 6 - 2 - 1
    assert one.num_pages * PAGE <= one.budget - sum((100, 6, 2, 1)) * GIB < (one.num_pages + 1) * PAGE


def test_pages_that_were_asked_for_are_given_or_refused() -> None:
    most = plan().num_pages
    assert plan(most).num_pages == most and plan(2).num_pages == 2
    with pytest.raises(OverCommitted) as refused:
        plan(most + 1)
    message = str(refused.value)
    for part in (f"limits.num_pages={most + 1}", "17.00 GiB are left", "weights 100.00 GiB", f"to {most} or less"):
        assert part in message, message


def test_nobody_gets_more_than_can_be_used() -> None:
    assert make_plan(limits(), H200, 0.9, DEMAND, PAGE, max_pages=2000).num_pages == 2000
    assert make_plan(limits(1500), H200, 0.9, DEMAND, PAGE, max_pages=1000).num_pages == 1500


def test_one_sequence_of_full_length_must_fit() -> None:
    needed = 65536 // 64 + 1
    left = make_plan(limits(), H200, 0.9, DEMAND, 17 * GIB // needed)
    assert left.num_pages == needed
    with pytest.raises(
        OverCommitted, match=r"one sequence of max_model_len=65536 tokens needs 1025 KV pages"
    ) as refused:
        make_plan(limits(), H200, 0.9, DEMAND, 17 * GIB // needed + 1)
    assert "Set limits.max_model_len to 65472 or less" in str(refused.value)


def test_advice_that_would_not_help_is_not_given() -> None:
    demand = Demand(weights=130 * GIB, activations=0, graphs=0, libraries=0)
    with pytest.raises(OverCommitted, match=r"0.00 GiB are left .* To fit, raise memory_fraction"):
        make_plan(limits(), H200, 0.9, demand, PAGE)


def test_memory_of_others_is_not_planned_with() -> None:
    shared = Memory(total=140 * GIB, free=70 * GIB)
    with pytest.raises(OverCommitted, match=r"only 70.00 GiB are free: others use 70.00 GiB.*memory_fraction to 0.5"):
        plan(used=shared)
    small = Demand(weights=20 * GIB, activations=1 * GIB, graphs=0, libraries=0)
    assert make_plan(limits(), shared, 0.5, small, PAGE).num_pages == 49 * GIB // PAGE


def test_table_has_every_use_and_adds_up() -> None:
    lines = {line[:12].strip(): float(line[12:21]) for line in plan().table().splitlines()}
    used = sum(lines[name] for name in ("weights", "activations", "graphs", "libraries", "KV pages", "left"))
    assert lines["budget"] == pytest.approx(used, abs=0.04) and lines["device"] == 140


def test_activations_grow_with_what_a_step_has() -> None:
    least = activation_bytes(V3, ALONE, 2048, 0, 16)
    for more in ((4096, 0, 16), (2048, 4096, 16), (2048, 0, 1024)):
        assert least < activation_bytes(V3, ALONE, *more)


def test_activations_shrink_by_less_than_the_ranks_of_a_replica() -> None:
    """Each has all rows, and all choices of experts."""
    whole, part = (activation_bytes(V3, dims, 2048) for dims in (ALONE, ParallelDims(tp=8, expert_tp=True)))
    assert whole / 8 < part < whole


def test_a_pass_of_experts_bounds_their_memory() -> None:
    few, many, most = (activation_bytes(V3, ParallelDims(dp=dp), 4096) for dp in (1, 4, 8))
    assert few < many == pytest.approx(most, rel=0.01)


def test_graphs_take_what_was_measured() -> None:
    """1.0 GiB with 30 layers and 32 experts, prompts to 1,024 rows and 256 sequences (docs/explanation/gpu.md)."""
    limits = Limits(num_pages=9, max_model_len=8192, max_running=256, max_prefill_tokens=16384)
    execution = Execution.model_validate({"graphs": "auto", "chunk_graph_tokens": 1024})
    layout = kv_layout(limits, execution, V3, "", torch.bfloat16)
    setup = RankSetup(Role.UNIFIED, limits, execution, V3, layout, ALONE, torch.device("cuda"), torch.bfloat16)
    assert estimated(setup, 0).graphs == pytest.approx(1.0 * GIB, rel=0.1)


def test_host_tier_that_cannot_fit_is_refused_with_numbers() -> None:
    limits, hosts = Limits(num_pages=10, max_model_len=64, host_cache_gib=100), ["a"] * 8 + ["b"] * 4
    for tp, available in ((1, 800 * GIB), (2, 400 * GIB), (4, 200 * GIB)):
        limits.check_host_memory(tp, hosts, "a", available)
        refused = rf"=100 for each of the {8 // tp} replicas of this host is {available / GIB:.2f} GiB, but only"
        with pytest.raises(OverCommitted, match=refused):
            limits.check_host_memory(tp, hosts, "a", available - 1)
    with pytest.raises(OverCommitted, match=r"only 700\.00 GiB of its memory are available. Set it to 87\.5 or less"):
        limits.check_host_memory(1, hosts, "a", 700 * GIB)


def test_host_tier_of_a_replica_on_several_hosts_is_refused() -> None:
    limits = Limits(num_pages=10, max_model_len=64, host_cache_gib=1)
    with pytest.raises(ValueError, match=r"host_cache_gib=1: the tp=2 ranks of replica 1 must be in one container"):
        limits.check_host_memory(2, ["a", "a", "a", "b"], "b", 8 * GIB)


@pytest.mark.parametrize(
    ("limit", "expected"), [("max", 4000 << 10), (str(3 << 20), (3 << 20) - 600), (None, 4000 << 10)]
)
def test_hosts_memory_is_what_machine_and_container_leave(tmp_path: Path, limit: str | None, expected: int) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 8000 kB\nMemFree: 100 kB\nMemAvailable: 4000 kB\nHugePages_Total: 0\n")
    if limit is not None:
        (tmp_path / "memory.max").write_text(f"{limit}\n")
        (tmp_path / "memory.current").write_text("1000\n")
        (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 400\n")
    assert host_memory(proc=tmp_path, cgroup=tmp_path) == expected


def test_hosts_memory_here() -> None:
    assert 0 < host_memory() < 1 << 50
