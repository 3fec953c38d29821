"""Experts over peer memory: the logits of `gather`, and sums bit for bit. Kernels run in Triton's interpreter."""

import functools
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.nn.functional as F
from millrace_kernels.fp8 import SMALL_TOKENS, Operand
from millrace_kernels.peer.exchange import Exchange
from millrace_kernels.triton import quant
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import load_model
from millrace_serve.model.eplb.placement import ExpertPlacement
from millrace_serve.model.experts.held import ExpertLayer, HeldExperts
from millrace_serve.model.experts.peer import PeerExperts
from millrace_serve.model.inputs import ForwardInput
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.weights import Checkpoint
from millrace_testing import triton_interpreter
from millrace_testing.tolerances import MODEL_TOLERANCE, assert_close
from model.harness import Driver, Seq, random_prompt
from model.ranks import run_jobs
from torch import Tensor

CPU, VOCAB, LAYER = torch.device("cpu"), 1280, 1
# New tokens of each replica's sequence; the largest exchange is 8 rows, so the first step takes three.
STEPS = [(20, 3, 0, 8), (1, 1, 5, 1), (0, 0, 0, 0), (1, 0, 1, 9)]
triton_interpreter.install()


def make_exchange(dims: ParallelDims, config: ModelConfig, dtype: torch.dtype, most_rows: int) -> Exchange:
    assert dims.dp_group is not None
    return Exchange(dims.dp_group, CPU, most_rows, config.hidden_size, config.num_experts_per_tok + 1, dtype)


def run_model(dims: ParallelDims, path: str, *, peer: bool) -> list[Tensor]:
    """The logits of this replica, step by step."""
    experts = None
    if peer:
        exchange = make_exchange(dims, ModelConfig.load(path), torch.float32, 8)
        experts = functools.partial(PeerExperts, exchange)
    driver = Driver(load_model(path, dims, CPU, torch.float32, experts=experts), seed=dims.rank)
    seq = Seq(random_prompt(40, VOCAB, dims.dp_rank))
    out = []
    for step in STEPS:
        num = step[dims.dp_rank]
        out.append(driver.step([(seq, num)] if num else [], 0, step[: dims.dp]))
    return out


def run_layer(dims: ParallelDims, path: str, dtype: torch.dtype, counts: tuple[int, ...]) -> None:
    """One layer against the sums of what every rank's own experts give for all rows."""
    config = ModelConfig.load(path)
    ckpt = Checkpoint(path, config, CPU, dtype, keep_quantised=dtype == torch.bfloat16)
    placement = ExpertPlacement.contiguous(config.num_kv_layers, config.n_routed_experts, dims.ep_size)
    layer = ExpertLayer(ckpt, config, dims, placement, LAYER)
    experts = PeerExperts(make_exchange(dims, config, dtype, max(counts)), layer)
    held = HeldExperts(layer, with_shared=experts.fuses_shared)
    first, num = sum(counts[: dims.dp_rank]), counts[dims.dp_rank]
    own = slice(first, first + num)
    for seed in range(3):
        x, weights, ids = _rows(config, dtype, sum(counts), seed)
        inputs = SimpleNamespace(dp_num_tokens=counts)
        found = experts.begin(Operand(x[own], None), weights[own], ids[own], cast(ForwardInput, inputs))()
        wide = experts.fp8_rows and sum(counts) > SMALL_TOKENS
        h = Operand(None, quant.quant_groups(x)) if wide else Operand(x, None)
        slots = held.slots(ids)
        if experts.fuses_shared:
            weights, slots = F.pad(weights, (0, 1), value=1.0), F.pad(slots, (0, 1), value=-1)
            slots[own, -1] = held.num_slots
        held.placed(h, weights, slots, partial := torch.empty_like(x))
        total = torch.zeros(num, config.hidden_size)
        for part in dims.dp_all_gather(partial):
            total += part[own].float()
        assert torch.equal(found, total.to(dtype)) and bool((found != 0).any()) == (num > 0)
    assert experts.fuses_shared == experts.fp8_rows == (dtype == torch.bfloat16)


def _rows(config: ModelConfig, dtype: torch.dtype, num: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    x = torch.randn(num, config.hidden_size, generator=seeded).to(dtype)
    weights = torch.rand(num, config.num_experts_per_tok, generator=seeded)
    ids = torch.stack([torch.randperm(config.n_routed_experts, generator=seeded)[: weights.shape[1]] for _ in x]).int()
    return x, weights, ids


@pytest.mark.long
def test_models_agree(random_bf16: Path, random_fp8: Path, tmp_path: Path) -> None:
    jobs = [
        (tp, dp, functools.partial(run_model, peer=peer), (str(path),))
        for tp, dp, path in ((1, 2, random_fp8), (2, 2, random_bf16), (1, 4, random_bf16))
        for peer in (True, False)
    ]
    results = run_jobs(jobs, tmp_path)
    for peer, gather in zip(results[::2], results[1::2], strict=True):
        for of_peer, of_gather in zip(peer, gather, strict=True):
            for logits, expected in zip(of_peer, of_gather, strict=True):
                assert_close(logits, expected, MODEL_TOLERANCE)


@pytest.mark.long
def test_sums_bit_for_bit(random_bf16: Path, random_fp8: Path, tmp_path: Path) -> None:
    """FP8 rows, the plain rows of few tokens, and a model without FP8; each with a replica that has fewer or none."""
    fp8, plain = (str(random_fp8), torch.bfloat16), (str(random_bf16), torch.float32)
    jobs = [
        (1, 2, run_layer, (*fp8, (30, 3))),
        (1, 2, run_layer, (*fp8, (0, 5))),
        (1, 4, run_layer, (*fp8, (9, 0, 1, 9))),
        (1, 4, run_layer, (*plain, (2, 0, 20, 1))),
    ]
    run_jobs(jobs, tmp_path)
