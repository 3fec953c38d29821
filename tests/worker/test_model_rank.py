"""What a rank of a model is told by its worker's configuration."""

from typing import Any

import pytest
from millrace_common.step_times import StepTimes
from millrace_serve.engine.config import Limits, Role
from millrace_serve.engine.start.phases import Phases
from millrace_serve.model.config import ModelConfigError
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.worker.config import WorkerConfig, WorkerTimeouts
from millrace_serve.worker.rank import model as model_rank
from millrace_serve.worker.rank import process
from millrace_serve.worker.rank.parts import RankSpec
from millrace_testing.paths import TINY


class Joined(Exception):
    pass


def test_collective_waits_as_long_as_the_worker_may_take_to_start(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {}

    def init_parallel(*_: object, **options: object) -> None:
        told.update(options)
        raise Joined

    monkeypatch.setattr(model_rank, "init_parallel", init_parallel)
    config = WorkerConfig(role=Role.UNIFIED, model=TINY, dp=2, timeouts=WorkerTimeouts(start=4800))
    with pytest.raises(Joined):
        model_rank.build(RankSpec(config, 1, "", "", "tcp://127.0.0.1:1"), Phases())
    assert told["timeout_s"] == 4800


def test_its_engine_begins_with_the_expected_times_of_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    times = StepTimes(0.02, token_s=1e-4)
    monkeypatch.setattr(model_rank, "init_parallel", lambda *_, **__: ParallelDims())
    monkeypatch.setattr(model_rank, "expected_times", lambda *_: times)
    limits = Limits(max_model_len=256, num_pages=32, max_running=2, max_prefill_tokens=64)
    config = WorkerConfig(role=Role.UNIFIED, model=TINY, limits=limits)
    engine = model_rank.build(RankSpec(config, 0, "", "", "tcp://127.0.0.1:1"), Phases()).engine
    assert engine is not None and engine._scheduler.speeds.times == times


def test_machine_without_a_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_rank.torch.cuda, "is_available", lambda: False)
    config = WorkerConfig(role=Role.UNIFIED, model=TINY, device="cuda")
    with pytest.raises(ModelConfigError, match="device=cuda: torch sees no GPU"):
        model_rank.build(RankSpec(config, 0, "", "", "tcp://127.0.0.1:1"), Phases())


@pytest.mark.parametrize(("phase", "expected"), [("load", process.StartRefused), ("compile", ValueError)])
def test_settings_are_refused_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, phase: str, expected: type[Exception]
) -> None:
    """Later a ValueError is a fault of ours, whose traceback belongs into the log."""

    def build(spec: RankSpec, phases: Phases) -> None:
        with phases(phase):
            raise ValueError("too many")

    monkeypatch.setattr(process, "_build", build)
    context: Any = None
    spec = RankSpec(WorkerConfig(role=Role.UNIFIED, model=TINY), 0, "", "", "tcp://127.0.0.1:1")
    with pytest.raises(expected, match="too many") as caught:
        process._serve(spec, context, b"", lambda report: None)
    assert caught.type is expected


@pytest.mark.parametrize(
    ("bind", "address"),
    [("ipc:///tmp/x/rank0-{name}", "127.0.0.1"), ("tcp://10.1.2.3:*", "10.1.2.3"), ("tcp://[fd00::a]:*", "fd00::a")],
)
def test_ranks_of_other_hosts_reach_it_where_the_frontend_does(
    monkeypatch: pytest.MonkeyPatch, bind: str, address: str
) -> None:
    told: dict[str, Any] = {}

    def load_rank(*_: object, **options: object) -> None:
        told.update(options)
        raise Joined

    monkeypatch.setattr(model_rank, "init_parallel", lambda *_, **__: ParallelDims(tp=1, dp=2))
    monkeypatch.setattr(model_rank, "load_rank", load_rank)
    config = WorkerConfig(role=Role.UNIFIED, model=TINY, dp=2)
    with pytest.raises(Joined):
        model_rank.build(RankSpec(config, 1, "", bind, "tcp://127.0.0.1:1"), Phases())
    assert told["address"] == address
