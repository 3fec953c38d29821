"""Experts move between ranks while the engine answers: its answers stay those of a single rank, and the ranks' loads
come closer to each other.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from engine import drafting
from engine.drafting import CPU, GREEDY, SEEDED, questions
from engine.harness import eager, request
from millrace_serve.engine.config import Execution, Limits, Role
from millrace_serve.engine.core import Request, Submit
from millrace_serve.engine.start.torch_factory import Rank, load_rank
from millrace_serve.model.eplb import moving
from millrace_serve.model.moe import Moe
from millrace_serve.model.parallel import ParallelDims
from millrace_testing import paths
from model.ranks import run_jobs

LIMITS = {"num_pages": 60, "max_model_len": 256, "max_running": 4, "max_prefill_tokens": 60, "checks": ("canary",)}
CASES = [(tp, dp, graphs, drafts) for tp, dp in ((1, 2), (2, 1)) for graphs, drafts in (("off", 0), ("on", 2))]
STEPS = 90
Served = tuple[dict[int, list[int]], list[list[float]], list[int], list[int]]


def asked() -> list[Request]:
    return [
        request(room, questions()[room % 3], max_tokens=24, ignore_eos=True, **(SEEDED if room % 2 else GREEDY))
        for room in range(6)
    ]


def skewed_rank(dims: ParallelDims, drafts: int, cuda: bool = False, **execution: object) -> Rank:
    """The trained model, whose gates prefer two experts of the first rank."""
    limits, options = Limits.model_validate({**LIMITS, "draft_tokens": drafts}), Execution.model_validate(execution)
    device = torch.device("cuda", dims.rank) if cuda else CPU
    rank = load_rank(limits, Role.UNIFIED, paths.TINY, dims, device, torch.float32, execution=options)
    model = rank.runner._model
    for layer in model.layers + ([model.mtp.layer] if drafts else []):  # type: ignore[attr-defined]
        if isinstance(layer.mlp, Moe):
            layer.mlp.gate.bias[2:4] += 0.3
    return rank


def serve(dims: ParallelDims, graphs: str, drafts: int, cuda: bool = False, exchange: str = "auto") -> Served:
    """Tokens by room; the layers' imbalance whenever it was measured; the steps that found an expert moved; and the
    steps that had a token.
    """
    moving.INTERVAL, moving.PLAN_STEPS, moving.LEAST_CHOICES = 20, 2, 1
    rank = skewed_rank(dims, drafts, cuda, graphs=graphs, exchange=exchange, redundant_experts=1)
    balancer = rank.runner._balancer
    assert balancer is not None
    if dims.tp_rank:
        rank.follow()
        return {}, [], [], []
    eager(rank.lockstep)
    one, said, measured, moved, spoke = rank.engine(), dict[int, list[int]](), [], [], []
    after = balancer.report
    arrivals = {step: [asked()[step // 12]] for step in range(0, 72, 12) if (step // 12) % dims.dp == dims.dp_rank}
    for step in range(1000):
        for each in arrivals.get(step, []):
            one.submit(Submit(each))
        if step == STEPS:
            one.stop()
        for output in one.step().outputs:
            assert output.error is None, output.error
            said.setdefault(output.id.room, []).extend(token.token_id for token in output.tokens)
            spoke.append(step)
        before, after = after, balancer.report  # another thread changes it at any time
        measured += [list(after.expert_imbalance)] if after.expert_imbalance != before.expert_imbalance else []
        moved += [step] if after.expert_moves > before.expert_moves else []
        if one.stopped:
            break
    assert not one.has_work(), f"{STEPS} steps are too few"
    one.check_idle()
    one.close()
    return said, measured, moved, spoke


def check(case: object, ranks: list[Served], expected: dict[int, list[int]]) -> None:
    said = {room: tokens for tokens_of_rank, *_ in ranks for room, tokens in tokens_of_rank.items()}
    assert said == expected, case
    _, measured, moved, spoke = ranks[0]
    assert sum(spoke[0] < step < spoke[-1] for step in moved) >= 3, (case, moved)
    assert np.mean(measured[1:]) < np.mean(measured[0]) - 0.2, (case, measured)


@pytest.mark.long
def test_answers_stay_while_experts_move(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    expected = drafting.tokens(drafting.run(skewed_rank(ParallelDims(), 0).engine(), asked()))
    jobs = [(tp, dp, serve, (graphs, drafts)) for tp, dp, graphs, drafts in CASES]
    for case, ranks in zip(CASES, run_jobs(jobs, tmp_path), strict=True):
        check(case, ranks, expected)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_answers_stay_while_experts_move_between_gpus(tmp_path: Path) -> None:
    """In captured graphs; weights travel over NCCL."""
    expected = drafting.tokens(drafting.run(skewed_rank(ParallelDims(), 0, cuda=True, graphs="off").engine(), asked()))
    exchanges = ("gather", "peer")
    jobs = [(1, 2, serve, ("on", 0, True, exchange)) for exchange in exchanges]
    for exchange, ranks in zip(exchanges, run_jobs(jobs, tmp_path, cuda=True), strict=True):
        check(exchange, ranks, expected)
