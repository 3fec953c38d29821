"""What `auto` becomes: for every role, goal, layout and GPU, and in a worker's configuration."""

import itertools
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from millrace_bench.v3 import SPARSE, V3, write_folder
from millrace_common.config import load
from millrace_serve.engine.config import GIB, Role
from millrace_serve.model.config import ModelConfig
from millrace_serve.plan.settings import AUTO_KEYS, Goal, Setup, decide, most_drafts
from millrace_serve.worker import config as worker_config
from millrace_serve.worker.config import WorkerConfig

MODEL = ModelConfig(num_hidden_layers=61, num_nextn_predict_layers=1, **V3)
GPUS, LAYOUTS = ("H100", "H200", "B200", ""), ((1, 8), (8, 1), (1, 1), (2, 1), (2, 4), (1, 32))
CONTEXT_PARALLEL = "limits.context_parallel_tokens"
SETUPS = list(itertools.product(GPUS, LAYOUTS, Role, Goal))


def chosen(**facts: Any) -> dict[str, Any]:
    setup = {"model": MODEL, "gpu": "H200", "tp": 1, "dp": 8, "role": Role.DECODE, "goal": Goal.BALANCED, **facts}
    return {choice.key: choice.value for choice in decide(Setup(**setup))}


@pytest.mark.parametrize(("gpu", "layout", "role", "goal"), SETUPS)
def test_every_key_has_a_value_that_a_worker_takes(
    gpu: str, layout: tuple[int, int], role: Role, goal: Goal, v3: Path
) -> None:
    tp, dp = layout
    choices = decide(Setup(MODEL, gpu, tp, dp, role, goal))
    assert tuple(choice.key for choice in choices) == AUTO_KEYS
    assert all(choice.why for choice in choices)
    sets = [f"{choice.key}={value(choice.value)}" for choice in choices]
    load(WorkerConfig, None, [f"model={v3}", "device=cuda", f"tp={tp}", f"dp={dp}", f"role={role}", *sets])


def value(chosen: Any) -> str:
    return str(list(chosen)) if isinstance(chosen, tuple) else str(chosen)


@pytest.mark.parametrize("goal", Goal)
def test_workers_that_hand_pages_over_agree_on_them(goal: Goal) -> None:
    """Whatever their role, ranks and GPU: the type of KV, and whether a page has an MTP layer."""
    found = [chosen(gpu=gpu, tp=tp, dp=dp, role=role, goal=goal) for gpu, (tp, dp), role, _ in SETUPS]
    assert len({one["kv_dtype"] for one in found}) == 1
    assert len({one["limits.draft_tokens"] > 0 for one in found}) == 1


def test_choices_as_measured() -> None:
    assert chosen(goal=Goal.THROUGHPUT)["kv_dtype"] == "float8_e4m3fn"
    assert chosen()["kv_dtype"] == chosen(goal=Goal.LATENCY)["kv_dtype"] == "auto"
    assert chosen()["limits.draft_batches"] == (256, 32, 8) and chosen()["limits.draft_tokens"] == 3
    assert chosen(gpu="H100")["limits.draft_tokens"] == 1, "with two, 128 sequences are slower than with one"
    assert chosen(tp=8, dp=1)["limits.draft_batches"] == (128, 128, 128)
    assert chosen(tp=8, dp=1)["expert_tp"] and not chosen()["expert_tp"] and not chosen(tp=2, dp=4)["expert_tp"]
    assert chosen(tp=2, dp=1, goal=Goal.LATENCY)["expert_tp"], "faster with 1 and 16 sequences"
    assert not chosen(tp=2, dp=1)["expert_tp"], "slower with 64"
    assert chosen(dp=2)["chunk_graph_tokens"] == 1024 and chosen(tp=2, dp=1)["chunk_graph_tokens"] == 2048
    assert chosen(role=Role.PREFILL)["redundant_experts"] == 1 and chosen()["redundant_experts"] == 0
    assert chosen(role=Role.PREFILL, dp=1)["redundant_experts"] == 0, "there are no other ranks"
    long = {(role, dp) for role in Role for dp in (1, 2, 8, 32) if chosen(role=role, dp=dp)[CONTEXT_PARALLEL]}
    assert long == {(Role.PREFILL, 2), (Role.PREFILL, 8)}


def test_what_a_model_lacks_is_not_chosen() -> None:
    plain = chosen(model=MODEL.without_mtp())
    assert plain["limits.draft_tokens"] == 0 == chosen(drafts=0)["limits.draft_tokens"]
    sparse = chosen(model=MODEL.model_copy(update=SPARSE), goal=Goal.THROUGHPUT)
    assert sparse["kv_dtype"] == "auto" and sparse["chunk_graph_tokens"] == 0
    assert chosen(model=MODEL.model_copy(update=SPARSE), role=Role.PREFILL)[CONTEXT_PARALLEL] == 0
    narrow = MODEL.model_copy(update={"moe_intermediate_size": 1408})
    assert not chosen(model=narrow, tp=8, dp=1)["expert_tp"], "176 columns are no whole blocks of 128"
    assert chosen(goal=Goal.THROUGHPUT, bf16=False)["kv_dtype"] == "auto"


# ------------------------------------------------------------------------------------------------ configurations


@pytest.fixture(scope="module")
def v3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("v3"), "v3", 61)


@pytest.mark.parametrize("key", [key for key in AUTO_KEYS if key != "limits.host_cache_gib"])
@pytest.mark.parametrize("where", ["engine=sim", "device=cpu", "device=cuda"])
def test_auto_is_what_an_absent_key_is(key: str, where: str, v3: Path) -> None:
    items = [where, f"model={v3}", "tp=2"]
    said, absent = load(WorkerConfig, None, [*items, f"{key}=auto"]), load(WorkerConfig, None, items)
    assert attrgetter(key)(said) == attrgetter(key)(absent)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kv_dtype", "bfloat16"),
        ("limits.max_running", 3),
        ("graphs", "off"),
        ("chunk_graph_tokens", 0),
        ("limits.max_prefill_tokens", 77),
        (CONTEXT_PARALLEL, 0),
        ("limits.draft_tokens", 0),
        ("limits.draft_batches", (1, 1)),
        ("expert_tp", False),
        ("redundant_experts", 0),
        ("memory_fraction", 0.5),
        ("limits.host_cache_gib", 0.0),
    ],
)
def test_what_is_set_stays(key: str, value: Any, v3: Path) -> None:
    items = [f"model={v3}", "device=cuda", "tp=2", "goal=throughput"]
    text = str(list(value)) if isinstance(value, tuple) else str(value)
    assert attrgetter(key)(load(WorkerConfig, None, [*items, f"{key}={text}"])) == value


@pytest.mark.parametrize(
    ("tp", "dp", "limit", "more", "gib"),
    [
        *((1, 8, 512, (), 24), (8, 1, 512, (), 192), (2, 4, 512, (), 48), (1, 1, 17, (), 0), (1, 1, 18, (), 1)),
        *((1, 8, 64, (), 0), (1, 8, 0, (), 0), (1, 8, 512, ("launcher=ray",), 0)),
    ],
)
def test_host_tier_follows_from_the_pods_memory_limit(
    tp: int, dp: int, limit: int, more: tuple[str, ...], gib: float, v3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only where it is asked for: it takes memory of the host, which may be meant for something else."""
    monkeypatch.setattr(worker_config, "memory_limit", lambda: limit * GIB)
    items = [f"model={v3}", "device=cuda", f"tp={tp}", f"dp={dp}", *more]
    said, absent = load(WorkerConfig, None, [*items, "limits.host_cache_gib=auto"]), load(WorkerConfig, None, items)
    assert (said.limits.host_cache_gib, absent.limits.host_cache_gib) == (gib, 0)


def test_a_cpu_keeps_its_defaults(v3: Path) -> None:
    one = load(WorkerConfig, None, [f"model={v3}", "goal=throughput"])
    assert (one.limits.max_running, one.limits.draft_tokens, one.kv_dtype) == (64, 0, "auto")


def test_random_weights_predict_nothing_unless_it_is_simulated(v3: Path) -> None:
    items = [f"model={v3}", "device=cuda", "dp=8", "random_weights=true"]
    assert load(WorkerConfig, None, items).limits.draft_tokens == 0
    assert load(WorkerConfig, None, [*items, "simulated_acceptance=[0.9, 0.8]"]).limits.draft_tokens == 2


def test_an_index_without_the_mtp_layer_means_no_drafts(v3: Path, tmp_path: Path) -> None:
    index = tmp_path / "model.safetensors.index.json"
    assert most_drafts({}, tmp_path, MODEL) == 3, "there is no index to ask"
    index.write_text('{"weight_map": {"model.layers.60.x": "a"}}')
    assert most_drafts({}, tmp_path, MODEL) == 0
    index.write_text('{"weight_map": {"model.layers.61.x": "a"}}')
    assert most_drafts({}, tmp_path, MODEL) == 3
