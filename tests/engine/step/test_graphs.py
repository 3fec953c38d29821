"""Decode steps padded to buckets say what unpadded ones say. On a CPU a replay is a call over the same memory."""

import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from engine import drafting
from engine.harness import request, said
from engine.replays import check_replays
from millrace_serve.engine.config import EngineConfig, Execution, Role
from millrace_serve.engine.core import Request
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.step.batch import StepBatch
from millrace_serve.engine.step.device import Device
from millrace_serve.engine.step.graphs import BUCKETS, DecodeGraphs, buckets_up_to
from millrace_serve.engine.step.slots import Slots
from millrace_serve.engine.step.staging import Staging
from millrace_serve.model.inputs import ForwardInput
from millrace_testing.tolerances import LOGPROB_TOLERANCE
from torch import Tensor

CPU = torch.device("cpu")
LENGTHS = (1, 5, 63, 64, 65, 130, 20)
SEEDED = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}


def engine(**execution: object) -> Engine:
    config = EngineConfig(
        num_pages=64, max_model_len=256, max_running=9, max_prefill_tokens=80, checks=("canary", "poison")
    )
    options = Execution.model_validate(execution)
    return drafting.rank_of(config, options=options).engine()


def requests(**sampling: object) -> list[Request]:
    """They end one after the other, so that steps of every size are taken."""
    prompts = [[10 + (7 * i + n) % 500 for i in range(n)] for n in LENGTHS]
    return [
        request(room, prompt, max_tokens=4 + 2 * room, logprobs=2, **sampling) for room, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(("sampling", "buckets"), [({"temperature": 0.0}, ()), (SEEDED, (4,))])
def test_padded_steps_equal_unpadded_ones(sampling: dict[str, object], buckets: tuple[int, ...]) -> None:
    plain = said(engine(graphs="off"), requests(**sampling))
    padded_engine = engine(graphs=buckets or "on")
    graphs = padded_engine._runner._graphs
    replays, graphs_run = [], graphs.run
    graphs.run = lambda rows: (replays.append(len(rows.slots)), graphs_run(rows))[1]
    padded = said(padded_engine, requests(**sampling))
    assert set(replays) <= set(graphs.buckets) and len(set(replays)) > 1
    assert plain.keys() == padded.keys()
    for room, answer in plain.items():
        assert [token for token, _ in padded[room]] == [token for token, _ in answer]
        assert [logprob for _, logprob in padded[room]] == pytest.approx([p for _, p in answer], abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("drafts", [0, 3])
def test_replay_leaves_what_the_call_leaves(drafts: int) -> None:
    """Also for GPUs (test_gpu.py); here a replay is a call, and no result depends on what an earlier one has left."""
    one = drafting.engine(drafts, graphs="on", draft_batches=(9, 5, 2))
    wanted = [(9, 2), (8, 3), (8, 2), (4, 3), (2, 4), (1, 4)] if drafts else [(9, 1), (8, 1), (4, 1), (2, 1), (1, 1)]
    assert sorted(one._runner._graphs._replays) == sorted(wanted)
    check_replays(one)
    one.close()


def test_engine_that_ends_lets_go_of_its_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's groups wait for graphs, for ever. What lives when a start is over is frozen: no collection frees it."""

    class Graph:
        def replay(self) -> None:
            pass

    captured: list[weakref.ref[Graph]] = []

    def capture(device: Device, run: Callable[[], None]) -> Callable[[], None]:
        graph = Graph()
        captured.append(weakref.ref(graph))
        return graph.replay

    monkeypatch.setattr(Device, "capture", capture)
    one = engine(graphs=(4,))
    runner = one._runner  # something may refer to it
    assert captured and all(graph() is not None for graph in captured)
    one.close()
    assert not any(graph() is not None for graph in captured), runner


def test_buckets_end_with_all_slots() -> None:
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(50) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 50)
    assert buckets_up_to(256) == BUCKETS
    assert buckets_up_to(400)[-4:] == (256, 320, 384, 400)
    assert buckets_up_to(16, (3, 8, 99)) == (3, 8, 16)


class Recorder:
    """Stands for a model: remembers its inputs, answers with the token ids as logits."""

    def __init__(self) -> None:
        self.seen: list[ForwardInput] = []

    def __call__(self, inputs: ForwardInput) -> tuple[Tensor, Tensor]:
        self.seen.append(inputs)
        tokens = inputs.token_ids[:, None].float()
        return tokens, tokens.expand(-1, 3)


def make(recorder: Recorder, dp: int = 1, drafts: int = 0) -> tuple[DecodeGraphs, Slots]:
    config = EngineConfig(num_pages=9, max_model_len=192, max_running=4, draft_tokens=drafts, draft_batches=(2, 2))
    state = Slots(config, CPU)
    state.last_tokens += torch.tensor([100, 101, 102, 103, 0])[:, None]
    accept = (lambda step, inputs, hidden, tokens: state.accept(step, tokens)) if drafts else None
    graphs = DecodeGraphs(Device(), lambda bucket: recorder, state, (2, 4), dp, accept, config.num_queries)
    graphs.capture()
    recorder.seen.clear()
    return graphs, state


def uploaded(batch: StepBatch[np.ndarray]) -> StepBatch[Tensor]:
    return Staging(Device(), 0).upload(0, batch, StepBatch[Tensor])


def decode(num_seqs: int, num_queries: int = 1) -> StepBatch[np.ndarray]:
    """A step of the first slots."""
    batch = StepBatch.idle()
    batch.num_decode, batch.num_queries, batch.all_decode = num_seqs, num_queries, True
    batch.slots = batch.sample_slots = np.arange(num_seqs)
    batch.num_rows = np.array([num_seqs * num_queries], np.int32)
    return batch


@torch.inference_mode()
def test_padding_rows_touch_the_sink_only() -> None:
    recorder = Recorder()
    graphs, state = make(recorder)
    state.page_table[:4, :2] = torch.arange(1, 9).view(4, 2)
    state.lengths[:4], state.capacity[:4] = 70, 128
    graphs.run(uploaded(graphs.pad(decode(4))))
    logits, positions = graphs.run(uploaded(graphs.pad(decode(3))))
    inputs = recorder.seen[-1]
    assert inputs.token_ids.tolist() == [100, 101, 102, 0] and logits[:, 0].tolist() == [100, 101, 102]
    assert positions.tolist() == [70, 70, 70] and inputs.positions.tolist() == [70, 70, 70, 0]
    assert inputs.attn.seq_lens.tolist() == [71, 71, 71, 1]
    assert inputs.kv_slots.tolist() == [2 * 64 + 6, 4 * 64 + 6, 6 * 64 + 6, 0]
    assert inputs.attn.page_table.tolist() == [[1, 2, 0], [3, 4, 0], [5, 6, 0], [0, 0, 0]], "a page of the step before"
    assert inputs.num_tokens is not None and inputs.num_tokens.tolist() == [3]
    assert inputs.attn.num_decode == len(inputs.token_ids) == 4 and inputs.attn.q_lens_host == (1, 1, 1, 1)


@torch.inference_mode()
def test_graph_holds_several_rows_of_each_sequence() -> None:
    """Rows without a page, those at or behind the capacity, go to the sink."""
    recorder = Recorder()
    graphs, state = make(recorder, drafts=2)
    state.page_table[:2, 0] = torch.tensor([5, 6])
    state.last_tokens[1] = torch.tensor([7, 8, 9])
    state.lengths[:2], state.capacity[:2] = torch.tensor([10, 62]), 64
    _, positions = graphs.run(uploaded(graphs.pad(decode(2, 3))))
    inputs = recorder.seen[-1]
    assert positions.tolist() == [10, 11, 12, 62, 63, 64]
    assert inputs.token_ids.tolist() == [100, 100, 100, 7, 8, 9]
    assert inputs.kv_slots.tolist() == [5 * 64 + 10, 5 * 64 + 11, 5 * 64 + 12, 6 * 64 + 62, 6 * 64 + 63, 0]
    assert inputs.attn.seq_lens.tolist() == [13, 65] and inputs.attn.q_lens_host == (3, 3)
    assert inputs.attn.q_lens_host == (3, 3)
    assert not graphs.holds(decode(2, 2)) and not graphs.holds(decode(4, 3)) and graphs.holds(decode(4))


@torch.inference_mode()
def test_replicas_replay_the_same_bucket() -> None:
    recorder = Recorder()
    graphs, _ = make(recorder, dp=2)
    idle = StepBatch.idle()
    idle.dp_num_tokens = idle.dp_num_sampled = (0, 3)
    idle.all_decode = True
    assert graphs.holds(idle) and len(graphs.pad(idle).slots) == 4
    graphs.run(uploaded(graphs.pad(idle)))
    assert recorder.seen[-1].dp_num_tokens == (4, 4) and recorder.seen[-1].token_ids.tolist() == [0] * 4
    assert recorder.seen[-1].num_tokens.tolist() == [0]
    idle.all_decode = False  # the other one has a prompt chunk
    assert not graphs.holds(idle)
    idle.dp_num_tokens = idle.dp_num_sampled = (0, 5)
    idle.all_decode = True
    assert not graphs.holds(idle)


@pytest.mark.parametrize(
    ("role", "options", "expected"),
    [
        (Role.PREFILL, {"graphs": "on"}, False),
        (Role.UNIFIED, {}, False),
        (Role.UNIFIED, {"graphs": True}, True),  # what YAML makes of `on`
        (Role.DECODE, {"graphs": "on"}, True),
    ],
)
def test_who_has_graphs(role: Role, options: dict[str, object], expected: bool) -> None:
    config = EngineConfig(num_pages=8, max_model_len=64, max_running=2, max_prefill_tokens=32)
    built = drafting.rank_of(config, role, Execution.model_validate(options)).engine()
    assert (built._runner._graphs is not None) is expected
    built.close()
