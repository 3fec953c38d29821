"""Steps with prompt chunks that are padded to buckets say what unpadded ones say. On a CPU a replay is a call."""

import dataclasses

import pytest
import torch
from engine import drafting
from engine.harness import request, said
from millrace_serve.engine.config import EngineConfig, Execution, Role
from millrace_serve.engine.core import Request
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.start import profiling_run
from millrace_serve.engine.step.chunk_graphs import BUCKETS, ChunkGraphs, chunk_buckets_up_to
from millrace_serve.engine.step.device import Device
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.inputs import AttnPlan, ForwardInput
from millrace_testing.tolerances import LOGPROB_TOLERANCE
from torch import Tensor

CPU = torch.device("cpu")
LENGTHS = (1, 5, 16, 17, 63, 64, 65, 130, 20)
PAGE = 16


@pytest.fixture
def model() -> DeepseekV3:
    return drafting.held(mtp=False)


def engine(chunk_graph_tokens: int, **limits: object) -> Engine:
    wanted = {
        "num_pages": 200, "page_size": PAGE, "max_model_len": 256, "max_running": 9, "max_prefill_tokens": 80,
        "checks": ("canary", "poison"), **limits,
    }  # fmt: skip
    # One graph of decode steps: test_graphs.py has them all.
    options = Execution.model_validate({"graphs": (9,), "chunk_graph_tokens": chunk_graph_tokens})
    config = EngineConfig.model_validate(wanted)
    return drafting.rank_of(config, options=options).engine()


def answers(one: Engine) -> dict[int, list[tuple[int, float]]]:
    """To prompts side by side, in several chunks and beside running sequences; then to some behind cached pages."""
    prompts = [[10 + (7 * i + n) % 500 for i in range(n)] for n in LENGTHS]
    found = said(one, [ask(room, prompt) for room, prompt in enumerate(prompts)], close=False)
    found |= said(one, [ask(len(prompts), prompts[7][:96] + prompts[4][:40])], close=False)
    return found | said(one, [ask(len(prompts) + 1, [*prompts[7][:96], 7, 8, 9])])


def ask(room: int, prompt: list[int]) -> Request:
    return request(room, prompt, max_tokens=3 + room % 6, logprobs=2)


def watched(one: Engine) -> list[tuple[int, int]]:
    """(rows, bucket) of each step with prompt chunks that was a graph, from now on."""
    graphs, seen = one._runner._chunk_graphs, list[tuple[int, int]]()
    forward = graphs.forward

    def watch(inputs: ForwardInput) -> Tensor:
        seen.append((len(inputs.token_ids), graphs._bucket(inputs)))
        return forward(inputs)

    graphs.forward = watch
    return seen


@pytest.mark.parametrize("drafts", [0, 2])
def test_padded_steps_equal_unpadded_ones(drafts: int) -> None:
    limits = {"draft_tokens": drafts, "draft_batches": drafting.EVERY_STEP}
    plain = answers(engine(0, **limits))
    padded_engine = engine(2048, **limits)
    seen, most = watched(padded_engine), padded_engine._runner._chunk_graphs.buckets[-1]
    padded = answers(padded_engine)
    assert {bucket for _, bucket in seen} == {16, 64, most} and any(rows < bucket for rows, bucket in seen)
    assert plain.keys() == padded.keys()
    for room, answer in plain.items():
        assert [token for token, _ in padded[room]] == [token for token, _ in answer]
        assert [logprob for _, logprob in padded[room]] == pytest.approx([p for _, p in answer], abs=LOGPROB_TOLERANCE)


def make(model: DeepseekV3, buckets: tuple[int, ...] = (16, 64)) -> tuple[ChunkGraphs, Tensor]:
    config = model.config
    kv = torch.zeros(9, config.num_kv_layers, PAGE, config.kv_row_dim)
    graphs = ChunkGraphs(Device(), model, kv, buckets)
    graphs.capture()
    return graphs, kv


def chunk(start: int, end: int) -> ForwardInput:
    """Of a sequence with the pages 1, 2, 3, …"""
    positions = torch.arange(start, end)
    table = torch.arange(1, 9, dtype=torch.int32)[None]
    attn = AttnPlan(0, torch.tensor([end], dtype=torch.int32), table, (end - start,), (end,))
    slots = table[0, positions // PAGE].long() * PAGE + positions % PAGE
    return ForwardInput(10 + positions * 7 % 100, positions, slots, attn, sample_rows=torch.arange(end - start))


@torch.inference_mode()
def test_every_row_is_that_of_the_model_and_padding_goes_to_the_sink(model: DeepseekV3) -> None:
    """Also behind cached tokens, and after a longer step that has left its rows in the buffers."""
    graphs, kv = make(model)
    wanted_kv = torch.zeros_like(kv)
    for start, end in ((0, 60), (60, 70), (70, 100), (100, 101)):
        got, wanted = graphs.forward(chunk(start, end)).clone(), model.forward(chunk(start, end), wanted_kv)
        assert got.shape[0] == end - start
        torch.testing.assert_close(got, wanted, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(kv[1:], wanted_kv[1:], atol=2e-5, rtol=2e-5)
    assert kv[0].any() and not wanted_kv[0].any()


@torch.inference_mode()
def test_replay_goes_through_all_gaps_with_what_the_capture_has_recorded(model: DeepseekV3) -> None:
    """As a GPU does it: the work between two gaps is recorded, and comes back with its tensors."""
    calls: list[str] = []

    class Recorded(Device):
        def capture_parts(self, run):  # type: ignore[no-untyped-def]
            gaps: list[tuple[Tensor, ...]] = []
            run(lambda *tensors: gaps.append(tensors))
            calls.append(f"captured {len(gaps)}")

            def replay(gap) -> None:  # type: ignore[no-untyped-def]
                for tensors in gaps:
                    calls.append("graph")
                    gap(*tensors)
                calls.append("graph")

            return replay

    config = model.config
    graphs = ChunkGraphs(Recorded(), model, torch.zeros(9, config.num_kv_layers, PAGE, config.kv_row_dim), (16,))
    graphs.capture()
    graphs.forward(chunk(0, 5))
    assert calls == [f"captured {config.num_hidden_layers}", *["graph"] * (config.num_hidden_layers + 1)]


def test_replicas_take_the_bucket_of_the_longest_one(model: DeepseekV3) -> None:
    graphs, _ = make(model)
    one = chunk(0, 5)
    assert graphs.holds(one) and graphs._bucket(one) == 16
    assert graphs._bucket(dataclasses.replace(one, dp_num_tokens=(5, 17))) == 64
    assert not graphs.holds(dataclasses.replace(one, dp_num_tokens=(5, 65)))
    assert not graphs.holds(dataclasses.replace(one, dp_num_tokens=(0, 0)))
    assert not graphs.holds(dataclasses.replace(one, shared=object()))  # type: ignore[arg-type]


def test_buckets_end_with_the_longest_step() -> None:
    assert chunk_buckets_up_to(0) == ()
    assert chunk_buckets_up_to(7) == (7,)
    assert chunk_buckets_up_to(100) == (16, 32, 64, 100)
    assert chunk_buckets_up_to(2048) == BUCKETS
    assert chunk_buckets_up_to(5000) == (*BUCKETS, 3072, 4096, 5000)


@pytest.mark.parametrize(
    ("role", "options", "last"),
    [
        (Role.UNIFIED, {}, 0),
        (Role.UNIFIED, {"graphs": "on"}, 82),
        (Role.PREFILL, {"graphs": "on"}, 82),
        (Role.DECODE, {"graphs": "on"}, 82),
        (Role.DECODE, {"graphs": "on", "chunk_graph_tokens": 40}, 42),
        (Role.UNIFIED, {"graphs": "on", "chunk_graph_tokens": 0}, 0),
    ],
)
def test_who_has_chunk_graphs(role: Role, options: dict[str, object], last: int) -> None:
    config = EngineConfig(num_pages=8, max_model_len=64, max_running=2, max_prefill_tokens=80)
    rank = drafting.rank_of(config, role, Execution.model_validate(options))
    graphs = rank.runner._chunk_graphs
    assert (0 if graphs is None else graphs.buckets[-1]) == last
    rank.engine().close()
    assert rank.runner._chunk_graphs is None


def test_step_for_each_bucket_has_as_many_rows() -> None:
    limits = EngineConfig(num_pages=8, max_model_len=64, max_running=3, max_prefill_tokens=80)
    shapes = {rows: profiling_run.chunk_shape(limits, rows) for rows in (16, 63, 80, 82, 83)}
    assert {rows: shape.num_tokens for rows, shape in shapes.items()} == {16: 16, 63: 63, 80: 80, 82: 81, 83: 81}
    assert all(shape.chunk < 64 and shape.chunks * shape.chunk <= 80 for shape in shapes.values())
