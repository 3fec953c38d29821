"""A whole FP8 model whose sums over TP run in the fused kernel, against one that sums by torch.distributed."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from millrace_kernels.peer.reduce_norm import ReduceNorm, Ways
from millrace_serve.model.deepseek_v3 import load_model
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import triton_interpreter
from model.harness import Driver, Seq, random_prompt
from model.ranks import run_jobs
from torch import Tensor

CPU, BF16, MOST = torch.device("cpu"), torch.bfloat16, 40
ONE, TWO = Ways(MOST, MOST), Ways(0, MOST)
# of two sequences: prompts, a decode row beside a chunk, decode rows, a step that is too large for the kernel
STEPS = [(20, 3), (1, 17), (1, 1), (0, 45)]
# Of a row's length, median. BF16 is rounded once or twice, which moves the choice of experts of random weights; rows
# that have nothing to do with each other are at 1.4.
TOLERANCE = 0.4


def run(dims: ParallelDims, path: str, ways: Ways | None, mtp: bool, dense_tp: int) -> list[Tensor]:
    """Logits of each step, and of a draft; without MTP those of the sampled rows."""
    triton_interpreter.install()
    model = load_model(path, replace(dims, dense_tp=dense_tp), CPU, BF16, keep_quantised=True, mtp=mtp)
    assert dims.tp_group is not None and model.reduce.fused is None
    if ways is not None:
        model.reduce.fused = ReduceNorm(dims.tp_group, model.config.hidden_size, CPU, ways)
    driver, seqs = Driver(model, dtype=BF16), [Seq(random_prompt(80, 1280, seed)) for seed in range(2)]
    out = []
    for nums in STEPS:
        inputs = driver.build([(seq, num) for seq, num in zip(seqs, nums, strict=True) if num])
        hidden = model.forward(inputs, driver.kv)
        out.append(model.logits(hidden if mtp else hidden[inputs.sample_rows]))
        if mtp:
            out.append(model.logits(model.forward_mtp(inputs, hidden, driver.kv)))
        for seq, num in zip(seqs, nums, strict=True):
            seq.computed += num
    return out


CASES = [(None, True, 1), (ONE, True, 1), (TWO, True, 1), (ONE, False, 0), (TWO, False, 0)]


@pytest.fixture(scope="module")
def results(random_fp8: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[list[Tensor]]]:
    jobs = [(2, 1, run, (str(random_fp8), *case)) for case in CASES]
    return run_jobs(jobs, tmp_path_factory.mktemp("ranks"))


@pytest.mark.long
def test_ranks_have_the_same_bits(results: list[list[list[Tensor]]]) -> None:
    for first, second in results:
        assert all(map(torch.equal, first, second))


@pytest.mark.long
def test_both_ways_give_what_an_all_reduce_gives(results: list[list[list[Tensor]]]) -> None:
    summed, one, two, one_sampled, two_sampled = (ranks[0] for ranks in results)
    assert all(map(torch.equal, one, two)), "the residual of a row was not that of its owner"
    assert far(one, summed) < TOLERANCE
    assert all(map(torch.equal, one_sampled, two_sampled)), "the last layer read rows that are on another rank"


def far(found: list[Tensor], expected: list[Tensor]) -> float:
    rows, wanted = torch.cat(found), torch.cat(expected)
    return float(((rows - wanted).norm(dim=1) / wanted.norm(dim=1)).median())
