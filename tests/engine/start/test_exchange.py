"""The choice of the exchange, and a step that ends without the answer of a rank."""

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from millrace_serve.engine.cache.kv_pool import KvLayout
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.start import exchange, profiling_run
from millrace_serve.engine.start.startup import RankSetup
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.experts.deepep_buffer import Machine
from millrace_serve.model.experts.gather import GatherExperts
from millrace_serve.model.experts.local import LocalExperts
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import FP8
from millrace_testing.checkpoint import CONFIG
from millrace_testing.paths import TINY

CPU = torch.device("cpu")
V3 = {**CONFIG, "hidden_size": 7168, "n_routed_experts": 32}
LIMITS = Limits(num_pages=9, max_model_len=512, max_running=20, draft_tokens=1, draft_batches=(10,))
LAYOUT = KvLayout(page_size=64, num_layers=3, dtype="bfloat16", latent_width=512, rope_width=64, model_hash="")


def setup(wanted: str = "auto", dp: int = 16, role: Role = Role.DECODE) -> RankSetup:
    execution = Execution.model_validate({"exchange": wanted, "graphs": [4, 9, 16]})
    return RankSetup(role, LIMITS, execution, ModelConfig.parse(V3), LAYOUT, ParallelDims(dp=dp), CPU, torch.bfloat16)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What DeepEP's buffers were made with, on hosts of eight ranks where everything is there."""
    buffers: list[Any] = []

    def make(*given: Any) -> Any:
        buffers.append(given[2:4])
        return SimpleNamespace(nbytes=7, error=torch.zeros(1, dtype=torch.int32))

    where(monkeypatch, 8)
    monkeypatch.setattr(exchange, "DeepEpBuffer", make)
    monkeypatch.setattr(RankSetup, "kept", FP8)
    return buffers


def where(monkeypatch: pytest.MonkeyPatch, per_host: int, rdma: bool = True) -> None:
    monkeypatch.setattr(exchange, "hosts", lambda dims: [str(rank // per_host) for rank in range(dims.world)])
    machines = lambda dims: [Machine(host, rdma, "") for host in exchange.hosts(dims)]  # noqa: E731
    monkeypatch.setattr(exchange, "machines", machines)


@pytest.mark.parametrize(("wanted", "dp"), [("auto", 16), ("deepep", 16), ("deepep", 8)])
def test_deepep_serves_several_hosts_and_who_asks_for_it(wanted: str, dp: int, made: list[Any]) -> None:
    found = exchange.make_exchange(setup(wanted, dp))
    assert (found.name, found.nbytes) == ("deepep", 7) and found.error is not None
    assert made == [(32 // dp, 32)], "slots of a rank, and the rows of 10 sequences with a draft in a bucket of 16"


def test_prefill_worker_has_no_low_latency(made: list[Any]) -> None:
    exchange.make_exchange(setup(role=Role.PREFILL))
    assert made == [(2, 0)]


@pytest.mark.parametrize(("wanted", "dp"), [("auto", 8), ("gather", 16)])
def test_otherwise_rows_are_gathered(wanted: str, dp: int, made: list[Any]) -> None:
    found = exchange.make_exchange(setup(wanted, dp))
    assert (found.name, found.experts, found.error) == ("gather", GatherExperts, None) and not made


def test_one_replica_has_no_exchange(made: list[Any]) -> None:
    assert exchange.make_exchange(setup("deepep", 1)).experts is LocalExperts and not made


def test_what_is_asked_for_and_cannot_run_is_an_error(
    made: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    where(monkeypatch, 8, rdma=False)
    with pytest.raises(ValueError, match=r"exchange=deepep cannot run: .* RDMA adapter .* exchange=gather"):
        exchange.make_exchange(setup("deepep"))
    assert exchange.make_exchange(setup()).name == "gather" and "RDMA adapter" in caplog.text and not made


def test_peers_serve_one_host_with_devices_that_reach_each_other(
    made: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=r"exchange=peer cannot run: the device is cpu"):
        exchange.make_exchange(setup("peer", 8))
    caplog.set_level("INFO")
    monkeypatch.setattr(exchange, "_peer", lambda setup: exchange.ExpertExchange("peer", GatherExperts))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(ParallelDims, "exchange", lambda dims, data: [b"1"] * (dims.dp - 1) + [data])
    for reached, dp, name in ((True, 8, "peer"), (False, 8, "gather"), (True, 16, "deepep")):
        monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda own, other, reached=reached: reached)
        on_gpu = dataclasses.replace(setup("auto", dp), device=torch.device("cuda", 1))
        assert exchange.make_exchange(on_gpu).name == name and f"exchange={name} dp={dp}" in caplog.text


def test_step_without_the_answer_of_a_rank_fails() -> None:
    limits = Limits(num_pages=9, max_model_len=512, max_running=4)
    runner = load_rank(limits, Role.UNIFIED, TINY, ParallelDims(), CPU, torch.float32).runner
    error = torch.zeros(1, dtype=torch.int32)
    runner.watch("sums", error)
    batch = profiling_run.batch_of(profiling_run.StepShape(num_decode=2), limits)
    assert runner.launch(batch).result().tokens.shape == (2, 1)
    error.fill_(1 + 3)
    with pytest.raises(RuntimeError, match="rank 3 did not answer in sums"):
        runner.launch(batch).result()
    runner.close()
