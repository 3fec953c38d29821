"""Warmed steps are legal, cover what they promise, and go through the runner of a real model."""

import numpy as np
import pytest
import torch
from engine.harness import request
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.core import Submit
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.start.phases import Phases, slowest, table
from millrace_serve.engine.start.profiling_run import (
    StepShape,
    batch_of,
    decode_shapes,
    largest,
    most_rows,
    prefill_shapes,
    shared_batch,
)
from millrace_serve.engine.start.torch_factory import load_rank
from millrace_serve.engine.step.batch import StepBatch
from millrace_serve.engine.step.device import Device
from millrace_serve.engine.step.slots import Slots
from millrace_serve.engine.step.staging import Staging
from millrace_serve.model.attn_step import FormThresholds, prefix_chunks
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.paths import TINY

V3 = Limits(num_pages="auto", max_model_len=163840, max_running=256, max_prefill_tokens=16384)
SMALL = Limits(num_pages=9, max_model_len=512, max_running=4, max_prefill_tokens=96)
SHORT = Limits(num_pages=9, max_model_len=40, max_running=3, max_prefill_tokens=96)
ONE = Limits(num_pages=9, max_model_len=5, max_running=1, max_prefill_tokens=1)


@pytest.mark.parametrize("limits", [V3, SMALL, SHORT, ONE])
def test_shapes_respect_the_limits(limits: Limits) -> None:
    found = [shape for topk in (0, 24, 128) for shape in prefill_shapes(limits, topk)]
    for shape in (largest(limits, 4096), *found):
        assert shape.pages <= limits.max_pages_per_seq
        assert shape.num_decode + shape.chunks <= limits.max_running
        assert shape.chunk + shape.prefix < limits.max_model_len
        assert shape.prefix % limits.page_size == 0
        assert shape.chunks * shape.chunk <= limits.max_prefill_tokens
        assert shape.num_tokens > 0


def test_largest_step_uses_every_slot_and_a_prefix() -> None:
    assert largest(V3, 8192) == StepShape(num_decode=255, chunks=1, chunk=16384, prefix=8192, greedy=False)
    assert largest(SHORT, 4096) == StepShape(num_decode=0, chunks=3, chunk=32, prefix=0, greedy=False)


def test_prompts_of_every_size_class_are_warmed() -> None:
    lengths = {shape.chunk for shape in prefill_shapes(V3) if shape.chunks == 1}
    assert {*range(1, 17), 64, 4096, 16384} <= lengths  # up to SMALL_TOKENS a token more may change the kernel
    assert {47, 3071, 12287} <= lengths  # Triton's kernels for lengths that are no multiples of 16
    assert len(lengths) == 16 + 10 + 10
    behind = {shape.chunk for shape in prefill_shapes(V3) if shape.prefix == 4096}
    assert behind == lengths - {3, 6, 7, 9, 10, 12, 13, 14, 15}, "the same behind cached tokens, but the smallest"
    widths = {shape.prefix // 64 for shape in prefill_shapes(V3) if shape.num_decode == shape.chunk == 1}
    assert {0, 1, 2, 4, 8, 16, 32, 64} <= widths
    prompts = {shape.chunks for shape in prefill_shapes(V3)}
    assert {1, 2, 4, 16, 64, 256} <= prompts and {11, 47, 191} <= prompts  # as many rows end the last layer
    assert [shape.num_decode for shape in decode_shapes(V3, (1, 4))] == [4, 4, 1, 1]


def test_every_graph_is_warmed() -> None:
    """Also those of a bucket that holds numbers of sequences with more drafts than it has when it is full."""
    limits = V3.model_copy(update={"max_running": 64, "draft_tokens": 3})
    steps = [(shape.num_decode, shape.num_queries, shape.greedy) for shape in decode_shapes(limits, (1, 8, 64))]
    keys = [(64, 4), (64, 3), (64, 2), (8, 4), (1, 4)]
    assert steps == [(*key, greedy) for key in keys for greedy in (True, False)]


@pytest.mark.parametrize("heads", [16, 32, 64, 128])
@pytest.mark.parametrize(("most", "length"), [(96, 4096), (2048, 4096), (96, 300)])
def test_products_are_compiled_for_as_many_cached_tokens_as_are_expanded(most: int, length: int, heads: int) -> None:
    """Their k and v are one product, which may have more rows than a step has."""
    limits = Limits(num_pages=9, max_model_len=length, max_running=8, max_prefill_tokens=most)
    expanded = FormThresholds.measured(torch.device("cuda"), heads).prefix_chunk_tokens
    rows = most_rows(limits, prefill_shapes(limits), expanded)
    chunks = prefix_chunks([length - 1] * limits.max_running, expanded, limits.page_size)
    assert max(sum(lens) for _, lens in chunks) <= rows <= expanded <= min(4096 * 128 // heads, 16384)


def test_sparse_attention_is_warmed_where_it_is_dense() -> None:
    """Behind cached tokens every prompt of V3 would be longer than the 2,048 keys that V3.2 chooses."""
    shapes = prefill_shapes(V3, 2048)
    dense = {shape for shape in shapes if shape.prefix + shape.chunk <= 2048}
    assert {1, 8, 47, 64, 767, 1024} <= {shape.chunk for shape in dense if shape.prefix and not shape.num_decode}
    assert {1, 2, 16} <= {shape.prefix // 64 for shape in dense if shape.num_decode == shape.chunk == 1}
    assert {1, 2, 16, 64} <= {shape.pages for shape in dense if shape.num_decode and shape.prefix}, "beside longer ones"
    assert {*prefill_shapes(V3)} < {*shapes} and len({*shapes}) == len(shapes)
    assert prefill_shapes(SHORT, 2048) == prefill_shapes(SHORT)


def test_cached_tokens_are_warmed_though_the_longest_prompt_is_one_step() -> None:
    limits = SMALL.model_copy(update={"max_prefill_tokens": 511})
    behind = {shape.chunk: shape.prefix for shape in prefill_shapes(limits) if shape.prefix and not shape.num_decode}
    assert max(behind) == 511 - 64 and behind[511 - 64] == 64 and behind[1] == 448


def test_batch_is_laid_out_as_the_builder_does() -> None:
    batch = batch_of(StepShape(num_decode=2, chunks=2, chunk=3, prefix=64, greedy=False), SMALL, dp=2)
    slots = Slots(SMALL, torch.device("cpu"))
    step = Staging(Device(), 0).upload(0, batch, StepBatch[torch.Tensor])
    slots.update(step.updates)
    inputs = slots.inputs(step)
    assert inputs.positions.tolist() == [0, 0, 64, 65, 66, 64, 65, 66]
    assert inputs.attn.seq_lens.tolist() == [1, 1, 67, 67] and inputs.attn.q_lens_host == (1, 1, 3, 3)
    assert inputs.attn.seq_lens_host[2:] == (67, 67) and inputs.attn.q_lens_host == (1, 1, 3, 3)
    assert not inputs.kv_slots.any() and inputs.attn.page_table.tolist() == [[0, 0]] * 4
    assert len(set(inputs.token_ids.tolist())) > 4
    assert batch.sample_rows.tolist() == [0, 1, 4, 7] and batch.dp_num_tokens == (8, 8)
    assert not batch.all_decode and len(batch.sampling.drawn) == 4
    assert batch_of(StepShape(num_decode=2), SMALL, graphs=True).all_decode
    assert not batch_of(StepShape(num_decode=2), SMALL).all_decode


def test_every_shape_runs_and_leaves_pages_alone() -> None:
    torch.set_num_threads(1)
    engine = load_rank(SMALL, Role.UNIFIED, TINY, ParallelDims(), torch.device("cpu"), torch.float32).engine()
    engine.pool.scrub(range(1, 9))
    for shape in (largest(SMALL, 4096), *prefill_shapes(SMALL), *decode_shapes(SMALL, (1, 4))):
        output = engine._runner.launch(batch_of(shape, SMALL)).result()
        assert len(output.tokens) == shape.num_decode + shape.chunks
    assert len(engine._runner.launch(shared_batch(SMALL, 1, 0)).result().tokens) == 0
    pages = engine.pool.buffer.numpy().reshape(9, -1)[1:]
    assert np.all(pages == 0xFF)
    engine.close()


def test_phases_add_up_and_the_slowest_rank_counts() -> None:
    now, begun = iter([0.0, 2.0, 10.0, 11.5]), []
    phases = Phases(begun.append, lambda: next(now))
    with phases("load"):
        pass
    with phases("load"):
        pass
    assert phases.seconds == {"load": 3.5} and begun == ["load", "load"]
    both = slowest([{"import": 1.0, "load": 3.5}, {"load": 4.0, "capture": 0.5}])
    assert list(both.items()) == [("import", 1.0), ("load", 4.0), ("capture", 0.5)]
    assert table(both) == "import 1.0 s  load 4.0 s  capture 0.5 s"
    with pytest.raises(AssertionError), phases("lunch"):
        pass


def test_fp8_cache_is_another_layout_of_a_quarter_of_fp32() -> None:
    def build(kv_dtype: str) -> Engine:
        options = Execution.model_validate({"kv_dtype": kv_dtype})
        limits = SMALL.model_copy(update={"checks": ("canary", "poison"), "num_pages": 20})
        return load_rank(
            limits, Role.UNIFIED, TINY, ParallelDims(), torch.device("cpu"), torch.float32, execution=options
        ).engine()

    said = {}
    for kv_dtype in ("auto", "float8_e4m3fn"):
        one = build(kv_dtype)
        one.submit(Submit(request(1, list(range(20, 150)), max_tokens=30, logprobs=0)))
        outputs = []
        while one.has_work():
            outputs += one.step().outputs
        assert not any(output.error for output in outputs), "a canary is a canary in any dtype"
        said[kv_dtype] = [token.logprob for output in outputs for token in output.tokens]
        one.close()
        said[kv_dtype, "layout"] = one.pool.layout
    wide, narrow = said["auto", "layout"], said["float8_e4m3fn", "layout"]
    assert wide.kv_bytes == 4 * narrow.kv_bytes and wide.fingerprint != narrow.fingerprint
    assert len(said["float8_e4m3fn"]) == 30 and said["float8_e4m3fn"] != said["auto"]
    assert said["float8_e4m3fn"][0] == pytest.approx(said["auto"][0], abs=0.5)
