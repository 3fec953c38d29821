"""Arrays in one block: every one of a batch comes back at its place, and slots do not disturb each other."""

from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import pytest
import torch
from millrace_serve.engine.lockstep.packing import ALIGN
from millrace_serve.engine.step.device import Device
from millrace_serve.engine.step.staging import NUM_SLOTS, Staging
from torch import Tensor

A = TypeVar("A")


@dataclass(slots=True)
class Inner(Generic[A]):
    words: A
    rows: list[tuple[int, A]]


@dataclass(slots=True)
class Tree(Generic[A]):
    first: A
    inner: Inner[A] | None
    name: str
    empty: A


def tree(seed: int = 0) -> Tree[np.ndarray]:
    rng = np.random.default_rng(seed)
    table = rng.integers(0, 1000, (3, 7)).astype(np.int32)
    rows = [(5, rng.integers(0, 9, 5)), (6, rng.random(1).astype(np.float32))]
    words = np.array([2**64 - 1, seed], np.uint64)
    return Tree(table[:, 2:5], Inner(words, rows), "kept", np.zeros((0, 4), np.int64))


def test_tree_of_arrays_becomes_the_same_tree_of_tensors() -> None:
    wanted = tree()
    sent = Staging(Device(), 0).upload(0, wanted, Tree[Tensor])
    assert sent.first.dtype == torch.int32 and np.array_equal(sent.first, wanted.first)
    assert sent.inner.words.tolist() == [-1, 0]  # u64 bits in int64
    assert [row for row, _ in sent.inner.rows] == [5, 6] and sent.inner.rows[1][1].dtype == torch.float32
    for (_, one), (_, other) in zip(sent.inner.rows, wanted.inner.rows, strict=True):
        assert np.array_equal(one, other)
    assert sent.name == "kept" and tuple(sent.empty.shape) == (0, 4)
    assert all(tensor.data_ptr() % ALIGN == 0 for tensor in (sent.first, sent.inner.words, sent.inner.rows[1][1]))


def test_slots_keep_their_content_until_they_are_used_again() -> None:
    staging = Staging(Device(), 0)
    sent = [staging.upload(slot, tree(slot), Tree[Tensor]) for slot in range(NUM_SLOTS)]
    for slot, one in enumerate(sent):
        assert np.array_equal(one.first, tree(slot).first)


def test_more_than_was_expected_is_found_room_for() -> None:
    staging = Staging(Device(), 16)
    big = np.arange(100_000)
    assert np.array_equal(staging.upload(0, {"big": big}, dict[str, Tensor])["big"], big)


def test_download_is_a_copy_of_the_moment() -> None:
    staging = Staging(Device(), 0)
    tokens = torch.arange(4)
    read = staging.download(0, {"tokens": tokens, "top": torch.ones(2, 0)})
    tokens.zero_()
    answer = read()
    assert answer["tokens"].tolist() == [0, 1, 2, 3] and answer["top"].shape == (2, 0)
    staging.download(0, {"tokens": torch.arange(4) + 10})
    assert answer["tokens"].tolist() == [0, 1, 2, 3]


def test_batch_without_arrays_is_a_batch_too() -> None:
    staging = Staging(Device(), 0)
    assert staging.upload(0, {"rows": None}, dict[str, Tensor | None]) == {"rows": None}
    assert staging.download(0, {})() == {}


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(KeyError):
        Staging(Device(), 0).upload(0, np.zeros(1, np.complex64), Tensor)


def test_what_is_no_array_is_refused_and_not_taken_for_one() -> None:
    with pytest.raises(TypeError, match="int64"):
        Staging(Device(), 0).upload(0, {"count": np.int64(3)}, dict[str, int])
