"""Decode steps padded to buckets say what unpadded ones say. On a CPU a replay is a call over the same memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from engine.harness import request, said
from millrace_serve.engine.config import EngineConfig, Execution, Role
from millrace_serve.engine.core import Request
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.start.rehearsal import Shape, batch_of
from millrace_serve.engine.start.torch_factory import build_engine
from millrace_serve.engine.step.batch import StepBatch
from millrace_serve.engine.step.device import Cpu
from millrace_serve.engine.step.graphs import BUCKETS, Columns, DecodeGraphs, PaddedRows, buckets_up_to, columns_size
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.paths import TINY
from millrace_testing.reference import LOGPROB_TOLERANCE
from torch import Tensor

CPU = torch.device("cpu")
LENGTHS = (1, 5, 63, 64, 65, 130, 20)
SEEDED = {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 3}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def engine(**execution: object) -> Engine:
    config = EngineConfig(
        num_pages=64, max_model_len=256, max_running=9, max_prefill_tokens=80, canary=True, poison=True
    )
    options = Execution.model_validate(execution)
    return build_engine(config, Role.UNIFIED, TINY, ParallelDims(), CPU, torch.float32, execution=options)


def requests(**sampling: object) -> list[Request]:
    """They end one after the other, so that steps of every size are taken."""
    prompts = [[10 + (7 * i + n) % 500 for i in range(n)] for n in LENGTHS]
    return [
        request(room, prompt, max_tokens=4 + 3 * room, logprobs=2, **sampling) for room, prompt in enumerate(prompts)
    ]


@pytest.mark.parametrize(
    ("sampling", "buckets"), [({"temperature": 0.0}, ()), ({"temperature": 0.0}, (1, 2, 3, 4, 5, 6, 7)), (SEEDED, (4,))]
)
def test_padded_steps_equal_unpadded_ones(sampling: dict[str, object], buckets: tuple[int, ...]) -> None:
    plain = said(engine(graphs="off"), requests(**sampling))
    padded_engine = engine(graphs="on", graph_buckets=buckets)
    graphs = padded_engine._runner._graphs
    replays, graphs_run = [], graphs.run
    graphs.run = lambda rows: (replays.append(rows.bucket), graphs_run(rows))[1]
    padded = said(padded_engine, requests(**sampling))
    assert set(replays) <= set(graphs.buckets) and len(set(replays)) > 1
    assert plain.keys() == padded.keys()
    for room, answer in plain.items():
        assert [token for token, _ in padded[room]] == [token for token, _ in answer]
        assert [logprob for _, logprob in padded[room]] == pytest.approx([p for _, p in answer], abs=LOGPROB_TOLERANCE)


def test_buckets_end_with_all_slots() -> None:
    assert buckets_up_to(1) == (1,)
    assert buckets_up_to(50) == (1, 2, 4, 8, 12, 16, 24, 32, 48, 50)
    assert buckets_up_to(256) == BUCKETS
    assert buckets_up_to(400)[-4:] == (256, 320, 384, 400)
    assert buckets_up_to(16, (3, 8, 99)) == (3, 8, 16)


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 9, 256])
def test_columns_of_a_block_do_not_overlap(rows: int) -> None:
    block = np.zeros(columns_size(rows), np.int64)
    columns = Columns.of(block, rows, np.int32)
    for value, name in enumerate(("slots", "positions", "kv_slots", "seq_lens", "num_tokens"), start=1):
        getattr(columns, name)[:] = value
    assert [set(getattr(columns, name).tolist()) for name in Columns.__slots__] == [{1}, {2}, {3}, {4}, {5}]
    sizes = [rows, rows, rows, rows, 1]
    assert [len(getattr(columns, name)) for name in Columns.__slots__] == sizes
    on_device = Columns.of(torch.from_numpy(block), rows, torch.int32)
    assert on_device.seq_lens.tolist() == [4] * rows and on_device.num_tokens.tolist() == [5]


class Recorder:
    """Stands for a model: remembers its inputs, answers with the token ids as logits."""

    def __init__(self) -> None:
        self.seen: list[ForwardInput] = []

    def __call__(self, inputs: ForwardInput) -> Tensor:
        self.seen.append(inputs)
        return inputs.token_ids[:, None].float().expand(-1, 3)


def make(recorder: Recorder, dp: int = 1) -> DecodeGraphs:
    last_tokens = torch.tensor([100, 101, 102, 103, 0])
    graphs = DecodeGraphs(Cpu(), lambda bucket: recorder, last_tokens, (2, 4), max_pages=3, vocab_size=3, dp=dp)
    graphs.capture()
    recorder.seen.clear()
    return graphs


def uploaded(rows: PaddedRows[np.ndarray]) -> PaddedRows[Tensor]:
    return PaddedRows(rows.bucket, torch.from_numpy(rows.block), torch.from_numpy(rows.page_table))


def test_padding_rows_touch_the_sink_only() -> None:
    recorder = Recorder()
    graphs = make(recorder)
    full, small = batch_of(Shape(num_decode=4), 64, graphs=True), batch_of(Shape(num_decode=3), 64, graphs=True)
    for batch in (full, small):
        batch.page_table = np.arange(1, 1 + 2 * batch.num_tokens, dtype=np.int32).reshape(-1, 2)
        batch.kv_slots, batch.seq_lens = batch.kv_slots + 64, batch.seq_lens + 70
    graphs.run(uploaded(graphs.pad(full, 4)))
    logits = graphs.run(uploaded(graphs.pad(small, 4)))
    inputs = recorder.seen[-1]
    assert inputs.token_ids.tolist() == [100, 101, 102, 0] and logits[:, 0].tolist() == [100, 101, 102, 0]
    assert inputs.attn.seq_lens.tolist() == [71, 71, 71, 1] and inputs.kv_slots.tolist() == [64, 64, 64, 0]
    assert inputs.attn.page_table[3, :2].tolist() == [0, 0], "a page of the step before"
    assert inputs.num_tokens_device is not None and inputs.num_tokens_device.tolist() == [3]
    assert inputs.attn.num_decode == inputs.num_tokens == 4 and inputs.attn.cu_q.tolist() == [0, 1, 2, 3, 4]


def test_replicas_replay_the_same_bucket() -> None:
    recorder = Recorder()
    graphs = make(recorder, dp=2)
    idle = StepBatch.idle()
    idle.dp_num_tokens, idle.all_decode = (0, 3), True
    assert graphs.bucket(idle) == 4
    graphs.run(uploaded(graphs.pad(idle, 4)))
    assert recorder.seen[-1].dp_num_tokens == (4, 4) and recorder.seen[-1].token_ids.tolist() == [0] * 4
    assert recorder.seen[-1].num_tokens_device.tolist() == [0]
    idle.all_decode = False  # the other one has a prompt chunk
    assert graphs.bucket(idle) is None
    idle.dp_num_tokens, idle.all_decode = (0, 5), True
    assert graphs.bucket(idle) is None


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
    config = EngineConfig(num_pages=8, max_model_len=64, max_running=2)
    built = build_engine(
        config, role, TINY, ParallelDims(), CPU, torch.float32, execution=Execution.model_validate(options)
    )
    built.close()
    assert (built._runner._graphs is not None) is expected
