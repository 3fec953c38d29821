"""A batch as bytes: followers get what pickle would give them, with every kind of field."""

import dataclasses
import pickle
from typing import Any

import numpy as np
import pytest
from millrace_serve.engine.cache.canary import CANARY_WORDS, CanaryBatch
from millrace_serve.engine.config import Limits
from millrace_serve.engine.lockstep.packing import decode, encode
from millrace_serve.engine.start.profiling_run import StepShape, batch_of
from millrace_serve.engine.step.batch import ContextParallelChunk, HostBatch, StepBatch
from millrace_serve.engine.step.sampling_batch import Bias, Penalties
from millrace_serve.model.context_parallel.split import Split

LIMITS = Limits(num_pages=50, max_model_len=512, max_running=8, draft_tokens=2)
RNG = np.random.default_rng(0)


def ints(*shape: int, dtype: Any = np.int64) -> np.ndarray:
    return RNG.integers(0, 2**31 - 1, shape).astype(dtype)


def full() -> HostBatch:
    """Every optional field is there."""
    batch = batch_of(StepShape(num_decode=3, num_queries=3, chunks=2, chunk=70, prefix=64, greedy=False), LIMITS, dp=2)
    assert batch.sampling is not None
    floats = RNG.random(4).astype(np.float32)
    joined = [(5, ints(100), ints(0)), (6, ints(7), ints(3))]
    batch.sampling.seeds = np.array([2**64 - 1, 0], np.uint64)
    batch.sampling.num_logprobs = 5
    batch.sampling.penalties = Penalties(ints(4), ints(4), floats, -floats, 2 * floats, joined)
    batch.sampling.bias = Bias(ints(2), ints(2), np.array([-np.inf, 0.5], np.float32), ints(2))
    batch.sampling.grammar = ints(2), ints(2, 9, dtype=np.int32)
    batch.shared = ContextParallelChunk(Split(1, 0, 2, 64, 128), ints(65), ints(1))
    words = ints(5, 3, CANARY_WORDS, dtype=np.uint64)
    batch.canary = CanaryBatch(ints(5, 3), words, ints(2), words[0, :2], ("room 1", "räum 2", "", "4", "5"))
    batch.summed = ints(3)
    return batch


def check_same(ours: Any, theirs: Any, where: str) -> None:
    assert type(ours) is type(theirs), where
    if isinstance(ours, np.ndarray):
        assert ours.dtype == theirs.dtype and ours.shape == theirs.shape and ours.tobytes() == theirs.tobytes(), where
        assert ours.flags.writeable and ours.flags.c_contiguous, where
    elif dataclasses.is_dataclass(ours):
        for field in dataclasses.fields(ours):
            check_same(getattr(ours, field.name), getattr(theirs, field.name), f"{where}.{field.name}")
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs), where
        for index, pair in enumerate(zip(ours, theirs, strict=True)):
            check_same(*pair, f"{where}[{index}]")
    else:
        assert ours == theirs, where


@pytest.mark.parametrize("batch", [StepBatch.idle(3), batch_of(StepShape(num_decode=4), LIMITS, dp=1), full()])
def test_batch_is_what_pickle_would_make_of_it(batch: HostBatch) -> None:
    check_same(decode(bytes(encode(batch))), pickle.loads(pickle.dumps(batch)), "batch")


def test_every_optional_field_is_tried() -> None:
    batch = full()
    for part in (batch, batch.sampling):
        for field in dataclasses.fields(part):
            assert getattr(part, field.name) is not None, field.name


def test_arrays_of_any_layout_are_packed() -> None:
    batch = StepBatch.idle()
    batch.slots = np.arange(40)[::3]
    batch.sample_rows = np.arange(12).reshape(3, 4).T
    packed = decode(encode(batch))
    assert np.array_equal(packed.slots, batch.slots) and np.array_equal(packed.sample_rows, batch.sample_rows)


def test_bytes_that_are_cut_short_are_refused() -> None:
    data = encode(full())
    for length in (4, 100, len(data) - 16):
        with pytest.raises(Exception, match=r"buffer|truncated|small"):
            decode(data[:length])
