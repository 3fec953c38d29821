"""Sparse attention in whole models: steps of every kind choose alike, ranks choose alike, E4M3 keys choose nearly what
exact ones do. transformers' answers are in test_family.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from millrace_serve.engine.config import Execution, Limits
from millrace_serve.engine.start.startup import kv_layout
from millrace_serve.model import mla
from millrace_serve.model.checkpoint.export_quantised import export
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.sparse_step import IndexPool
from millrace_serve.model.weights import Checkpoint
from millrace_testing.other_weights import write_other
from millrace_testing.sparse import INDEXER, write_sparse
from millrace_testing.tolerances import MODEL_TOLERANCE, assert_close
from model.harness import Driver, Seq, random_prompt
from model.ranks import run_jobs
from torch import Tensor

CPU, VOCAB = torch.device("cpu"), 1280
TOPK = INDEXER["index_topk"]
FEW_TOLERANCE = 1e-3  # as in test_family.py


def load(path: Path, **options: bool) -> DeepseekV3:
    return load_model(path, ParallelDims(), CPU, torch.float32, **options)


@pytest.fixture(scope="module")
def sparse(random_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sparse(tmp_path_factory.mktemp("sparse") / "model", random_bf16)


@pytest.fixture(scope="module")
def model(sparse: Path) -> DeepseekV3:
    return load(sparse)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Tensor]]:
    """The chosen rows of each call of sparse attention."""
    calls: list[Tensor] = []
    attend = mla.mla_sparse

    def recorded(q: Tensor, kv: Tensor, rows: Tensor, *rest: Any) -> Tensor:
        page_rows = kv.stride(0) // kv.shape[2]  # other pools have other ones
        calls.append(torch.where(rows < 0, -1, rows // page_rows * 64 + rows % page_rows))
        return attend(q, kv, rows, *rest)

    monkeypatch.setattr(mla, "mla_sparse", recorded)
    return calls


def test_chunks_beside_decodes_say_what_the_whole_prompt_says(model: DeepseekV3, chosen: list[Tensor]) -> None:
    tokens = random_prompt(200, VOCAB, 1)
    whole = Driver(model).step([(Seq(tokens), 200)])
    counts = (chosen[0] >= 0).sum(1)
    assert counts.tolist() == [min(position + 1, TOPK) for position in range(200)]
    driver, seq, other = Driver(model, seed=1), Seq(tokens), Seq(random_prompt(300, VOCAB, 2))
    driver.step([(other, 140)])
    found = []
    for num in (10, 1, 70, 64, 1, 1, 53):  # first short, so dense, chunks and single tokens
        work = [(other, 1), (seq, num)] if num > 1 else [(seq, num)]
        logits = driver.step(work)
        found.append(logits[-num:])
    assert_close(torch.cat(found), whole, MODEL_TOLERANCE)


def test_drafts_choose_for_themselves(model: DeepseekV3) -> None:
    """A decode sequence with three rows, as verification of two drafts has it, beside a padded one of its kind."""
    tokens = random_prompt(150, VOCAB, 3)
    expected = Driver(model).step([(Seq(tokens), 150)])[-3:]
    driver, seqs = Driver(model), [Seq(tokens), Seq(random_prompt(90, VOCAB, 4))]
    driver.step([(seqs[0], 147), (seqs[1], 60)])
    inputs = driver.build([(seqs[0], 3), (seqs[1], 3)])
    inputs = replace(inputs, attn=replace(inputs.attn, num_decode=2, seq_lens_host=(0, 0)))
    hidden = model.forward(inputs, driver.kv)
    assert_close(model.logits(hidden)[:3], expected, MODEL_TOLERANCE)


def test_all_keys_chosen_is_dense_attention(
    random_bf16: Path, tmp_path: Path, sparse: Path, chosen: list[Tensor]
) -> None:
    tokens = random_prompt(100, VOCAB, 7)
    roomy = load(write_sparse(tmp_path / "model", random_bf16, index_topk=100))  # a page table has room for 128
    logits = [Driver(one).step([(Seq(tokens), 100)]) for one in (load(random_bf16), load(sparse))]
    assert not torch.allclose(*logits, atol=0.1), "worth comparing"
    driver, seq = Driver(roomy), Seq(tokens)
    chosen.clear()
    driver.step([(seq, 99)])
    assert not chosen, "a short chunk is dense"
    found = driver.step([(seq, 1)])
    assert chosen
    assert_close(found, logits[0][-1:], MODEL_TOLERANCE)


def test_e4m3_keys_choose_nearly_what_exact_ones_do(model: DeepseekV3, chosen: list[Tensor]) -> None:
    tokens, first = random_prompt(200, VOCAB, 8), []
    for dtype in (torch.float32, torch.bfloat16):
        driver = Driver(model, dtype=dtype)
        assert driver.pool.layout.index_row_bytes == (512 if dtype == torch.float32 else 132)
        driver.step([(Seq(list(tokens)), 200)])
        first.append(chosen[0][100:])
        chosen.clear()
    shared = [len(set(a) & set(b)) / TOPK for a, b in zip(*(slots.tolist() for slots in first), strict=True)]
    assert 0.85 < sum(shared) / len(shared) < 1.0


def test_pool_of_e4m3_keys_gives_the_same_tokens_in_chunks(model: DeepseekV3) -> None:
    prompts = [random_prompt(n, VOCAB, n) for n in (30, 130)]
    found = [Driver(model, dtype=torch.bfloat16).greedy(prompts, 16, chunk) for chunk in (1 << 30, 1 << 20)]
    whole, again = found
    assert whole == again and len(set(whole[0])) > 4


def test_fp8_weights(sparse: Path, tmp_path: Path) -> None:
    """The indexer's projections stay in FP8 as published; its weights and its norm do not."""
    export(sparse, tmp_path / "fp8")
    prompt = random_prompt(60, VOCAB, 9)
    plain, kept = (load(tmp_path / "fp8", keep_quantised=keep) for keep in (False, True))
    assert kept.layers[0].self_attn.indexer is not None
    assert not isinstance(kept.layers[0].self_attn.indexer.wk, Tensor)
    drivers, seqs = [Driver(plain), Driver(kept)], [Seq(list(prompt)), Seq(list(prompt))]
    for driver, seq in zip(drivers, seqs, strict=True):  # quantised activations choose other keys, so many rows differ
        assert driver.step([(seq, 50)]).isfinite().all()
    drivers[1].pool.rows[:] = drivers[0].pool.rows
    few, wanted = (driver.step([(seq, 10)]) for driver, seq in zip(reversed(drivers), reversed(seqs), strict=True))
    errors = (few - wanted).norm(dim=1) / wanted.norm(dim=1)
    assert float(errors.median()) < FEW_TOLERANCE, "products of few rows run on the weights without more rounding"


def test_other_weights_take_the_place_of_these(sparse: Path, tmp_path: Path) -> None:
    other, served, tokens = (
        write_other(tmp_path / "other", 1, source=sparse),
        load(sparse),
        random_prompt(80, VOCAB, 11),
    )
    before = Driver(served).step([(Seq(tokens), 80)])
    served.load(Checkpoint(other, served.config, CPU, torch.float32))
    expected = Driver(load(other)).step([(Seq(tokens), 80)])
    assert torch.equal(Driver(served).step([(Seq(tokens), 80)]), expected) and not torch.equal(before, expected)


def test_mtp_layer_has_keys_of_its_own(model: DeepseekV3, chosen: list[Tensor]) -> None:
    tokens = random_prompt(141, VOCAB, 10)
    driver, whole = Driver(model), Seq(tokens[:140])
    hidden = model.forward(driver.build([(whole, 140)]), driver.kv)
    drafts = []
    for sizes in ((140,), (100, 38, 1, 1)):
        drafter, shifted, start, out = Driver(model, seed=1), Seq(tokens[1:]), 0, []
        for num in sizes:
            inputs = drafter.build([(shifted, num)])
            out.append(model.forward_mtp(inputs, hidden[start : start + num], drafter.kv))
            shifted.computed, start = shifted.computed + num, start + num
        drafts.append(torch.cat(out))
    assert_close(drafts[1], drafts[0], MODEL_TOLERANCE)
    pool = IndexPool.of(drafter.kv, model.config)
    assert pool is not None
    keys = [pool.layer(layer).data[shifted.pages[0]] for layer in range(model.config.num_kv_layers)]
    assert keys[-1].isfinite().all() and all(one.isnan().all() for one in keys[:-1])


def run_ranks(dims: ParallelDims, path: str) -> list[Tensor]:
    driver = Driver(load_model(path, dims, CPU, torch.float32), seed=dims.rank)
    seq = Seq(random_prompt(140, VOCAB, dims.dp_rank))
    return [driver.step([(seq, num)], 0, (num,) * dims.dp if dims.dp > 1 else ()) for num in (100, 1, 30)]


@pytest.mark.long
def test_ranks_say_what_one_says(sparse: Path, tmp_path: Path) -> None:
    grid = [(2, 1), (1, 2), (2, 2)]
    results = run_jobs([(tp, dp, run_ranks, (str(sparse),)) for tp, dp in grid], tmp_path)
    for (tp, _), ranks in zip(grid, results, strict=True):
        for rank, found in enumerate(ranks):
            driver, seq = Driver(load(sparse)), Seq(random_prompt(140, VOCAB, rank // tp))
            for step, num in zip(found, (100, 1, 30), strict=True):
                assert_close(step, driver.step([(seq, num)]), MODEL_TOLERANCE)


def test_prompts_are_not_shared(model: DeepseekV3) -> None:
    limits = Limits(context_parallel_tokens=4096, num_pages=8, max_model_len=256)
    with pytest.raises(ValueError, match=r"^limits.context_parallel_tokens=4096: must be 0 .*index_topk"):
        kv_layout(limits, Execution(), model.config, "hash", torch.bfloat16)


def test_pool_without_index_keys_is_refused(model: DeepseekV3) -> None:
    config = model.config
    with pytest.raises(AssertionError, match="no room for index keys"):
        IndexPool.of(torch.zeros(2, config.num_kv_layers, 64, config.kv_row_dim), config)
