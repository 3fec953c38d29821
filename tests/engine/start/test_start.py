"""The end of a start: everything is compiled, captures see no collection, and what lives is frozen."""

import dataclasses
import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine.start.test_compile_ahead import LIMITS, setup
from millrace_serve.engine.config import Execution, Role
from millrace_serve.engine.start import memory, startup
from millrace_serve.engine.start.phases import Phases
from millrace_serve.engine.step import graphs
from millrace_serve.engine.step.device import Device
from millrace_serve.engine.step.graphs import DecodeGraphs
from millrace_serve.engine.step.slots import Slots
from millrace_serve.model.parallel import ParallelDims


class NoRunner:
    """Takes the steps of a start without a device, and notes them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def launch(self, batch: Any) -> Any:
        self.tokens.append(batch.num_tokens)
        return SimpleNamespace(result=lambda: None)

    def call(self, function: Any) -> Any:
        return function()


@pytest.mark.parametrize("role", Role)
def test_products_of_every_size_are_compiled_then_objects_are_frozen(
    role: Role, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []
    monkeypatch.setattr(startup.fp8, "compile_ahead", lambda tokens, device: done.append((tokens, device.type)))
    monkeypatch.setattr(startup, "capture", lambda *args: done.append("captured"))
    monkeypatch.setattr(startup.gc_hooks, "freeze", lambda: done.append("frozen"))
    runner = NoRunner()
    config = LIMITS.resolved(9)
    startup.prepare(setup("cuda", role), config, runner, Phases())  # type: ignore[arg-type]
    cached = config.max_running * config.max_model_len  # tokens, of which k and v are made at a time
    assert max(runner.tokens) >= config.max_prefill_tokens
    assert done[0] == (max(*runner.tokens, cached), "cuda")
    assert done[1:] == ["captured", "frozen"]


def test_nothing_is_compiled_for_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    monkeypatch.setattr(startup.gc_hooks, "freeze", lambda: frozen.append(1))
    runner = NoRunner()
    plain = dataclasses.replace(setup(), execution=setup().execution.model_copy(update={"graphs": "off"}))
    startup.prepare(plain, LIMITS.resolved(9), runner, Phases())  # type: ignore[arg-type]
    assert runner.tokens == [] and frozen == []


@pytest.mark.parametrize("collector", [False, True])
def test_capture_is_not_interrupted_by_collections(collector: bool) -> None:
    """While a graph is captured the collector is off and what lives is frozen; afterwards it is on."""
    during: list[bool] = []

    class Watching(Device):
        def capture(self, run: Any) -> Any:
            during.append(gc.isenabled())
            return super().capture(run)

    def forward(inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = inputs.token_ids.shape[0]
        return torch.zeros(rows, 4), torch.zeros(rows, 8)

    config = LIMITS.resolved(9)
    one = DecodeGraphs(Watching(), lambda bucket: forward, Slots(config, torch.device("cpu")), (1, 3))
    frozen = gc.get_freeze_count()
    one.capture(collector)
    assert during == [collector] * 2 and gc.isenabled() and (gc.get_freeze_count() <= frozen) is collector


@pytest.mark.parametrize(("drafts", "buckets", "number"), [(0, (1, 2), 3), (2, (1, 2), 6), (2, (3,), 6)])
def test_memory_is_reserved_for_every_graph(
    drafts: int, buckets: tuple[int, ...], number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With drafts a step has two graphs, and a bucket with several numbers of drafts several steps."""
    captured: list[Any] = []
    monkeypatch.setattr(startup, "device_of", lambda device: SimpleNamespace(torch=device, capture=captured.append))
    monkeypatch.setattr(DecodeGraphs, "_capture", lambda self, run: self._device.capture(run))
    one = setup(drafts=drafts)
    limits = LIMITS.model_copy(update={"draft_tokens": drafts, "draft_batches": (2, 1)})
    wanted = one.execution.model_copy(update={"graphs": buckets, "chunk_graph_tokens": 0})
    one = dataclasses.replace(one, limits=limits, execution=wanted)
    config, runner = limits.resolved(9), NoRunner()
    runner.slots, runner.forward = Slots(config, one.device), None  # type: ignore[attr-defined]
    runner.accept = object() if drafts else None  # type: ignore[attr-defined]
    runner.use_graphs = lambda *graphs: None  # type: ignore[attr-defined]
    runner.chunk_graphs = lambda device, buckets: None  # type: ignore[attr-defined]
    startup.capture(one, config, runner)  # type: ignore[arg-type]
    assert len(captured) == number
    assert startup.estimated(one, 0).graphs >= number * memory.GRAPH_BYTES


@pytest.mark.parametrize(
    ("tp", "dp", "wanted", "rows"),
    [
        (1, 1, "auto", 1024 + 8),
        (4, 1, "auto", 4096 + 8),
        (16, 1, "auto", 8192 + 8),  # as many as a step has
        (1, 2, "auto", 1024 + 8),
        (1, 2, 96, 96 + 8),
        (2, 1, 0, 0),
    ],
)
def test_steps_with_chunks_are_graphs_where_launches_take_longer(
    tp: int, dp: int, wanted: int | str, rows: int
) -> None:
    limits = LIMITS.model_copy(update={"max_prefill_tokens": 8192, "max_running": 8})
    execution = Execution.model_validate({"graphs": "on", "chunk_graph_tokens": wanted})
    one = dataclasses.replace(setup(), limits=limits, execution=execution, dims=ParallelDims(tp=tp, dp=dp))
    assert max(one.chunk_buckets, default=0) == rows
    alone = dataclasses.replace(one, role=Role.PREFILL)
    assert max(alone.chunk_buckets, default=0) == (8200 if rows == 8200 else max(rows - 8, 0))
    sparse = one.model.model_copy(update={"index_topk": 64})
    assert dataclasses.replace(one, model=sparse).chunk_buckets == ()


def test_memory_of_chunk_graphs_is_what_comes_back_with_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    free, captured = iter([5 << 30, 8 << 30]), []
    monkeypatch.setattr(startup, "_free", lambda device: next(free))
    graphs = SimpleNamespace(capture=lambda: captured.append("captured"))
    runner = SimpleNamespace(call=lambda run: run(), chunk_graphs=lambda device, buckets: graphs if buckets else None)
    one = setup()
    assert startup.MemoryPlanner(one)._chunk_graphs(runner, Device()) == 3 << 30  # type: ignore[arg-type]
    assert captured == ["captured"]
    without = dataclasses.replace(one, execution=Execution.model_validate({"graphs": "off"}))
    assert startup.MemoryPlanner(without)._chunk_graphs(runner, Device()) == 0  # type: ignore[arg-type]


def test_capture_that_fails_leaves_the_collector_on() -> None:
    with pytest.raises(ZeroDivisionError), graphs.without_collector():
        assert not gc.isenabled()
        raise ZeroDivisionError
    assert gc.isenabled()
