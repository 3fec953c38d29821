"""DeepEP's two modes give what the gathering exchange gives; a stand-in over gloo takes the library's place."""

from typing import Any

import numpy as np
import pytest
import torch
from millrace_kernels.fp8 import Operand
from millrace_kernels.testing.tolerances import rms_error
from millrace_serve.model.checkpoint.random_weights import RandomWeights
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.eplb.placement import ExpertPlacement
from millrace_serve.model.experts.deepep import DeepEpExperts
from millrace_serve.model.experts.deepep_buffer import DeepEpBuffer, Machine, machines, refusal
from millrace_serve.model.experts.gather import GatherExperts
from millrace_serve.model.experts.held import ExpertLayer
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import FP8
from millrace_testing import fake_deep_ep
from millrace_testing.checkpoint import CONFIG
from millrace_testing.tolerances import FP8_EXPERTS_TOLERANCE
from model.ranks import Job, run_jobs
from torch import Tensor

CPU, EXPERTS, LAYER = torch.device("cpu"), 16, 2
PLACED = (("contiguous", 2), ("replicas", 4))  # where experts are, and replicas of the model
# DeepEP leaves the shared expert to an MLP of its own.
MODEL = ModelConfig.parse({**CONFIG, "hidden_size": 512, "n_routed_experts": EXPERTS, "n_shared_experts": 0})
MOST_ROWS = 7  # which becomes 64 of 2 replicas and 32 of 4, so that an expert has room for whole blocks
# Rows of every replica in a step, which is in low latency up to these. Some replicas idle, and once all of them.
STEPS = [(8, 1, 3, 5), (65, 40, 3, 1), (70, 0, 2, 0), (2, 0, 6, 1), (0, 0, 0, 0), (1, 33, 1, 1), (1, 1, 1, 1)]


def placed(name: str, ranks: int) -> ExpertPlacement:
    if name == "contiguous":
        return ExpertPlacement.contiguous(LAYER + 1, EXPERTS, ranks)
    rng = np.random.default_rng(0)
    held = rng.permutation(np.concatenate([np.arange(EXPERTS), rng.choice(EXPERTS, 2 * ranks)])).astype(np.int32)
    return ExpertPlacement(np.broadcast_to(held.reshape(ranks, -1), (LAYER + 1, ranks, len(held) // ranks)), EXPERTS)


def inputs_of(dims: ParallelDims, step: int, counts: tuple[int, ...]) -> tuple[Operand, Tensor, Tensor, ForwardInput]:
    num, rng = counts[dims.rank], torch.Generator().manual_seed(100 * step + dims.rank)
    h = torch.randn(num, MODEL.hidden_size, generator=rng).bfloat16()
    ids = torch.rand(num, EXPERTS, generator=rng).argsort(dim=1)[:, : MODEL.num_experts_per_tok].int()
    ids[2:3] = -1  # padding
    weights = torch.rand(ids.shape, generator=rng)
    none = torch.zeros(num, dtype=torch.int64)
    return Operand(h, None), weights, ids, ForwardInput(none, none, none, None, none, counts)  # type: ignore[arg-type]


def run_both(dims: ParallelDims, placement: str) -> list[tuple[Tensor, ...]]:
    """(DeepEP's result, the gathering exchange's) of every step."""
    fake_deep_ep.install()
    where, ckpt = placed(placement, dims.world), RandomWeights(CPU, torch.bfloat16, FP8)
    buffer = DeepEpBuffer(MODEL, dims, where.experts.shape[2], MOST_ROWS, CPU)
    layer = ExpertLayer(ckpt, MODEL, dims, where, LAYER)
    exchanges = DeepEpExperts(buffer, layer), GatherExperts(layer)
    found = []
    for step, counts in enumerate(STEPS):
        arguments = inputs_of(dims, step, counts[: dims.dp])
        found.append(tuple(exchange.begin(*arguments)() for exchange in exchanges))
    buffer.close()
    return found


def run_silent(dims: ParallelDims) -> tuple[list[int], list[tuple[Any, ...]]]:
    """The errors before and after rank 1 stopped answering, and the machines of all ranks."""
    fake_deep_ep.install()
    ckpt, where = RandomWeights(CPU, torch.bfloat16, FP8), placed("contiguous", dims.world)
    buffer = DeepEpBuffer(MODEL, dims, EXPERTS // dims.world, MOST_ROWS, CPU)
    exchange, found = DeepEpExperts(buffer, ExpertLayer(ckpt, MODEL, dims, where, LAYER)), []
    for silent in ((), (1,)):
        buffer.buffer.silent = silent
        exchange.begin(*inputs_of(dims, 0, (1, 1)))()
        found.append(int(buffer.error))
    return found, [tuple(machine) for machine in machines(dims)]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], list[Any]]:
    jobs: dict[tuple[str, int], Job] = {(name, dp): (1, dp, run_both, (name,)) for name, dp in PLACED}
    jobs["silent", 2] = 1, 2, run_silent, ()
    return dict(zip(jobs, run_jobs(list(jobs.values()), tmp_path_factory.mktemp("ranks")), strict=True))


@pytest.mark.parametrize(("name", "dp"), PLACED)
def test_both_modes_give_what_gather_gives(name: str, dp: int, results: dict[tuple[str, int], list[Any]]) -> None:
    for rank, steps in enumerate(results[name, dp]):
        for (found, expected), counts in zip(steps, STEPS, strict=True):
            assert found.shape == (counts[rank], MODEL.hidden_size) and found.dtype == torch.bfloat16
            assert rms_error(found, expected) < FP8_EXPERTS_TOLERANCE
            assert (found[2:3] == 0).all(), "padding"
            assert not counts[rank] or found.count_nonzero() > 0


def test_rank_that_does_not_answer_is_named(results: dict[tuple[str, int], list[Any]]) -> None:
    assert [errors for errors, _ in results["silent", 2]] == [[0, 2], [0, 2]]


def test_machines_are_those_of_all_ranks(results: dict[tuple[str, int], list[Any]]) -> None:
    (one, other), seen_by_the_other = (found for _, found in results["silent", 2])
    assert [one, other] == seen_by_the_other and one == other
    host, _, missing = one
    assert host and (torch.cuda.is_available() or "libcuda.so.1" in missing)


HERE, THERE = Machine("a", True, ""), Machine("b", True, "")
V3 = ModelConfig.parse({**CONFIG, "hidden_size": 7168})


@pytest.mark.parametrize(
    ("why", "changes"),
    [
        ("", {}),
        ("", {"dims": ParallelDims(dp=16), "where": [HERE] * 8 + [THERE] * 8}),
        ("tp=2", {"dims": ParallelDims(tp=2, dp=8)}),
        ("dp=3", {"dims": ParallelDims(dp=3), "where": [HERE] * 3}),
        ("not FP8", {"fp8": False}),
        ("hidden_size=512", {"config": MODEL}),
        ("num_experts_per_tok=12", {"config": V3.model_copy(update={"num_experts_per_tok": 12})}),
        ("1009 rows, more than 1008: lower max_running", {"most_rows": 1009}),
        ("8 consecutive ranks", {"where": [HERE] * 4 + [THERE] * 4}),
        ("8 consecutive ranks", {"dims": ParallelDims(dp=16), "where": [HERE, THERE] * 8}),
        ("RDMA adapter", {"dims": ParallelDims(dp=16), "where": [HERE] * 8 + [Machine("b", False, "")] * 8}),
        (
            "rank 7: No module named 'deep_ep'",
            {"where": [HERE] * 7 + [Machine("a", True, "No module named 'deep_ep'")]},
        ),
    ],
)
def test_what_deepep_cannot_serve_is_said(why: str, changes: dict[str, Any]) -> None:
    arguments = {"config": V3, "dims": ParallelDims(dp=8), "where": [HERE] * 8, "most_rows": 256, "fp8": True}
    found = refusal(**{**arguments, **changes})
    assert bool(found) == bool(why) and why in found
