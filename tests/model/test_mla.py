"""The choice of a form, and that the three forms are the same maths."""

import sys
from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from millrace_kernels import mla_decode
from millrace_kernels.testing.tolerances import poisoned
from millrace_serve.model import mla
from millrace_serve.model.attn_step import FORMS, FormThresholds, prefix_chunks
from millrace_serve.model.deepseek_v3 import load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_testing.examples import examples
from millrace_testing.tolerances import MODEL_TOLERANCE, assert_close
from model.harness import Driver, Seq, random_prompt

LIMIT = FormThresholds(absorb_max_queries=100)


def test_the_threshold_is_that_of_the_device_and_of_the_heads() -> None:
    def found(device: str, heads: int) -> int:
        return FormThresholds.measured(torch.device(device), heads).absorb_max_queries

    assert [found("cpu", 4), found("cpu", 128), found("meta", 128)] == [48, 48, 48]
    assert [found("cuda", 16), found("cuda:1", 17), found("cuda", 128)] == [600, 320, 320]


@pytest.mark.parametrize(
    ("q_lens", "prefix_lens", "absorbed"),
    [
        ((), (), False),
        ((5, 3000), (0, 0), False),
        ((5,), (64,), True),
        ((100,), (64,), True),
        ((101,), (64,), False),
        ((3000, 5), (0, 640), False),
        ((3000, 5), (640, 64), False),
        ((200, 5), (64, 6400), True),  # the long prefix serves few queries
    ],
)
def test_choice_of_the_form(q_lens: tuple[int, ...], prefix_lens: tuple[int, ...], absorbed: bool) -> None:
    seq_lens = [q + p for q, p in zip(q_lens, prefix_lens, strict=True)]
    assert LIMIT.absorbs(q_lens, seq_lens) is absorbed


@given(st.lists(st.integers(0, 700), max_size=6), st.integers(1, 900))
@examples(40)
def test_prefix_chunks_cover_every_prefix_once(prefix_lens: list[int], max_tokens: int) -> None:
    covered = [0] * len(prefix_lens)
    for starts, lens in prefix_chunks(prefix_lens, max_tokens, 64):
        assert any(lens)
        assert sum(lens) <= max(max_tokens, 64 * sum(n > 0 for n in prefix_lens))
        for i, (start, num) in enumerate(zip(starts, lens, strict=True)):
            if num:
                assert start == covered[i] and start % 64 == 0
                covered[i] += num
    assert covered == prefix_lens


def test_forms_agree_on_a_whole_model(random_bf16: Path) -> None:
    """Ragged chunks over cached prefixes of several lengths, prefix chunks smaller than a prefix."""
    lens, cached = (70, 200, 333, 64), (0, 130, 260, 63)
    results = []
    for thresholds in (FormThresholds(1 << 30), FormThresholds(0), FormThresholds(0, prefix_chunk_tokens=64)):
        model = load_model(random_bf16, ParallelDims(), torch.device("cpu"), torch.float32, thresholds)
        driver, seqs = Driver(model), [Seq(random_prompt(n, 1280, n)) for n in lens]
        driver.step([(seq, n) for seq, n in zip(seqs, cached, strict=True) if n])
        results.append(driver.step([(seq, n - c) for seq, n, c in zip(seqs, lens, cached, strict=True)]))
    assert_close(results[1], results[0], MODEL_TOLERANCE)
    assert_close(results[2], results[0], MODEL_TOLERANCE)


@pytest.mark.parametrize("most", [16, 64])
def test_chunks_of_more_queries_than_a_call_takes_go_in_pieces(
    most: int, random_bf16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside a decode sequence, behind cached tokens and without; 128 queries are a multiple of both, 73 and 70 not."""
    lens, cached = (70, 200, 333, 64, 300, 292), (0, 130, 260, 63, 172, 164)
    model = load_model(random_bf16, ParallelDims(), torch.device("cpu"), torch.float32, FORMS["absorbed"])
    results, decode = [], Mock(wraps=mla_decode.mla_decode)
    monkeypatch.setattr(mla, "mla_decode", decode)
    for limit in (sys.maxsize, most):
        monkeypatch.setattr(mla_decode, "most_queries", lambda dtype, limit=limit: limit)
        driver, seqs = Driver(model), [Seq(random_prompt(n, 1280, n)) for n in lens]
        driver.step([(seq, n) for seq, n in zip(seqs, cached, strict=True) if n])
        decode.reset_mock()
        results.append(driver.step([(seq, n - c) for seq, n, c in zip(seqs, lens, cached, strict=True)]))
        layers = len(model.layers)
        calls = Counter(call.args[0].shape[:2] for call in decode.call_args_list)
        found = Counter(queries for _, queries in calls.elements())
        if limit == sys.maxsize:
            assert found == {1: layers, 70: layers, 73: layers, 128: layers}
            assert calls[2, 128] == layers and calls[2, 70] == layers
        else:
            assert found == {1: layers, 70 % most: 2 * layers, 73 % most: layers, most: 5 * layers}
    assert_close(results[1], results[0], MODEL_TOLERANCE)


def test_step_touches_only_its_own_slots(random_bf16: Path) -> None:
    """Rows of other sequences, free pages and the tails of own pages keep their bytes; the padding goes to the sink."""
    model = load_model(random_bf16, ParallelDims(), torch.device("cpu"), torch.float32)
    driver, other, seq = Driver(model), Seq(random_prompt(70, 1280, 1)), Seq(random_prompt(70, 1280, 2))
    driver.step([(other, 70)])
    before = driver.kv.clone()
    driver.step([(seq, 70)], padding=6)
    expected = poisoned(tuple(driver.kv.shape))
    expected[[0, *other.pages]] = before[[0, *other.pages]]
    layers = model.config.num_hidden_layers  # the MTP layer's rows are written by the MTP step
    for index, page in enumerate(seq.pages):
        rows = min(70 - index * 64, 64)
        assert driver.kv[page, :layers, :rows].isfinite().all()
        expected[page, :layers, :rows] = driver.kv[page, :layers, :rows]
    expected[0] = driver.kv[0]
    assert driver.kv[0].isfinite().all()
    assert torch.equal(driver.kv.nan_to_num(-1.0), expected.nan_to_num(-1.0))
