"""The gate and the experts that the table chooses on a GPU, over DeepSeek-V3's widths, against the references."""

import functools
import importlib.util

import pytest
import torch
from kernels.graphs import captured
from millrace_kernels import backend, moe_gate
from millrace_kernels.backend import SMALL_TOKENS, forced
from millrace_kernels.expert_slots import expert_slots
from millrace_kernels.fp8 import Operand, quant_groups
from millrace_kernels.moe_experts import expected_rows, moe_experts
from millrace_kernels.testing.expert_inputs import Experts, choose, draw_experts, held_ids, rule_of
from millrace_kernels.testing.shapes import TINY, V3_TP8, Dims
from millrace_kernels.triton import moe_grouped, moe_small
from millrace_kernels.triton.moe_grouped import Launch
from millrace_testing.tolerances import FP8_EXPERTS_TOLERANCE, OP_TOLERANCE, assert_close
from torch import Tensor

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
TOKENS = [0, 1, 7, SMALL_TOKENS, SMALL_TOKENS + 1, 64, 128, 4096]
EP8_HELD, EP8_FIRST, EP8_SIZE = 32, 96, 2048
REFERENCES = dict.fromkeys(backend.TABLE, "")
# A few tokens for each tile and each compiled kernel: DeepGEMM takes 3 to 5 s for one.
RANK_TOKENS = [(num, True) for num in (0, 1, 7, SMALL_TOKENS, SMALL_TOKENS + 1, 4096)]
RANK_TOKENS += [(num, False) for num in (1, SMALL_TOKENS, SMALL_TOKENS + 1, 4096)]
TP8_TOKENS = [*RANK_TOKENS, *((num, True) for num in (64, 128, 256, 512, 1024))]  # configurations of their own
NOT_CHOSEN = [
    ("millrace_kernels.triton.moe_grouped:moe_experts_fp8", 17),
    ("millrace_kernels.triton.moe_grouped:moe_experts_fp8", 3000),
    ("millrace_kernels.lib.deep_gemm_grouped:moe_experts_fp8", 17),
]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(device=CUDA).manual_seed(seed)


def rows(num: int, dim: int) -> Tensor:
    return torch.randn(num, dim, generator=seeded(num), device=CUDA).bfloat16()


@functools.cache
def weights_of(held: int, dim: int, size: int, fp8: bool) -> Experts:
    return draw_experts(held, dim, size, torch.bfloat16, fp8, CUDA, seeded(3))


@pytest.mark.parametrize("num", TOKENS)
def test_gate_logits(num: int) -> None:
    x, weight = rows(num, 7168), rows(256, 7168)
    found = moe_gate.gate_logits(x, weight)
    assert found.dtype == torch.float32 and torch.equal(found, moe_gate.gate_logits(x, weight))
    found = found.sum(0) if found.dim() == 3 else found  # in parts
    assert_close(found, x.double() @ weight.double().t(), 1e-5)


@pytest.mark.parametrize("num", TOKENS)
@pytest.mark.parametrize("dims", [TINY, V3_TP8], ids=lambda d: d.name)
def test_gate(num: int, dims: Dims) -> None:
    logits = torch.randn(num, dims.experts, generator=seeded(num), device=CUDA).round(decimals=1)  # with ties
    bias = torch.zeros(dims.experts, device=CUDA)
    real = torch.tensor([max(num - 2, 0)], dtype=torch.int32, device=CUDA)
    rule = rule_of(dims)
    loads = torch.zeros(dims.experts, dtype=torch.int32, device=CUDA)
    weights, experts = moe_gate.moe_gate(logits, bias, rule, real, loads)
    assert torch.equal(loads, torch.bincount(experts.flatten() + 1, minlength=dims.experts + 1)[1:].int())
    parts = torch.stack((logits, *[logits, -logits] * 13, torch.zeros_like(logits)))  # as many as of V3's; exact sums
    assert all(map(torch.equal, moe_gate.moe_gate(parts, bias, rule, real), (weights, experts)))
    with forced(**REFERENCES):
        expected_weights, expected_experts = moe_gate.moe_gate(logits, bias, rule, real)
    # An ulp between the two sigmoids may turn sums of two that are almost equal; choices of the same scores may not.
    assert (experts != expected_experts).any(1).sum() <= num // 100
    same = (experts == expected_experts).all(1)
    assert_close(weights[same], expected_weights[same], 1e-5)


def test_expert_slots() -> None:
    table = torch.randint(-1, 33, (24, 257), generator=seeded(0), dtype=torch.int32, device=CUDA)
    table[:, -1] = -1
    ids = torch.randint(-1, 256, (1000, 8), generator=seeded(1), dtype=torch.int32, device=CUDA)
    found = expert_slots(ids, table)
    with forced(**REFERENCES):
        assert torch.equal(found, expert_slots(ids, table))


@pytest.mark.parametrize(("num", "fp8"), TP8_TOKENS)
def test_tensor_parallel_rank_with_the_shared_expert(num: int, fp8: bool) -> None:
    check(num, V3_TP8, 257, 0, V3_TP8.moe_intermediate, fp8, True)


@pytest.mark.parametrize(("num", "fp8"), RANK_TOKENS)
def test_expert_parallel_rank(num: int, fp8: bool) -> None:
    check(num, V3_TP8, EP8_HELD, EP8_FIRST, EP8_SIZE, fp8, False)


@pytest.mark.parametrize(("num", "fp8"), [(1, True), (7, True), (1, False), (40, False)])
def test_tiny(num: int, fp8: bool) -> None:
    check(num, TINY, TINY.experts, 0, TINY.moe_intermediate, fp8, False)


@pytest.mark.parametrize(("target", "num"), NOT_CHOSEN)
def test_what_the_table_does_not_choose_here(target: str, num: int) -> None:
    if "deep_gemm" in target and importlib.util.find_spec("deep_gemm") is None:
        pytest.skip("deep_gemm is not installed")
    with forced(**{"moe_experts.moe_experts_fp8": target}):
        check(num, V3_TP8, EP8_HELD, EP8_FIRST, EP8_SIZE, True, False)


@pytest.mark.parametrize(("block_m", "warps", "stages"), [(32, 4, 3), (64, 8, 4)])
@pytest.mark.parametrize("num", [96, 1000])
def test_weights_as_the_left_operand(
    num: int, block_m: int, warps: int, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with several blocks of an expert."""
    launches = (Launch(warps, stages, left=True), Launch(warps, stages, left=True))
    monkeypatch.setattr(
        moe_grouped, "config", lambda rows, held, size: moe_grouped.MoeGroupedConfig(block_m, *launches)
    )
    with forced(**{"moe_experts.moe_experts_fp8": "millrace_kernels.triton.moe_grouped:moe_experts_fp8"}):
        check(num, V3_TP8, EP8_HELD, EP8_FIRST, EP8_SIZE, True, False)


def check(num: int, dims: Dims, held: int, first: int, size: int, fp8: bool, shared: bool) -> None:
    x, (w13, w2) = rows(num, dims.hidden), weights_of(held, dims.hidden, size, fp8)
    weights, experts = choose(num, dims, CUDA, seeded(num))
    experts[3:4] = -1
    experts[4:5] = first  # one expert eight times
    arguments = (weights, held_ids(experts, first, held - shared), w13, w2)
    options = {"shared_expert": shared, "num_experts": dims.experts}
    operand = Operand(x, quant_groups(x) if fp8 and num > SMALL_TOKENS else None)
    expecting = (held, dims.hidden, size, expected_rows(num, dims.top_k, dims.experts))
    chosen = backend.implementation("moe_experts.moe_experts_fp8", CUDA, num, expecting)
    rounded = fp8 and chosen is not moe_small.moe_experts_fp8  # the others read activations in FP8
    out = moe_experts(operand, *arguments, **options)
    again = moe_experts(operand, *arguments, **options)
    assert torch.equal(out, again)
    with forced(**REFERENCES):
        expected = moe_experts(x, *arguments, **options)
    assert_close(out, expected, FP8_EXPERTS_TOLERANCE if rounded else OP_TOLERANCE[torch.bfloat16])


@pytest.mark.parametrize(("num", "fp8"), [(1, True), (SMALL_TOKENS, True), (96, True), (96, False)])
def test_graph_follows_new_choices_and_its_padding(num: int, fp8: bool) -> None:
    """Captured once with one routing, replayed with others: nothing of the host's may be baked in."""
    (w13, w2), dims = weights_of(EP8_HELD, 7168, EP8_SIZE, fp8), V3_TP8
    x, bias, real = rows(num, 7168), torch.zeros(256, device=CUDA), torch.ones(1, dtype=torch.int32, device=CUDA)
    router = rows(256, 7168) / 7168**0.5

    def step() -> Tensor:
        weights, experts = moe_gate.moe_gate(moe_gate.gate_logits(x, router), bias, rule_of(dims), real)
        return moe_experts(x, weights, held_ids(experts, EP8_FIRST, EP8_HELD), w13, w2, num_experts=256)

    graph, out = captured(step)
    for seed, count in ((1, num), (2, -(-num // 2))):
        x.copy_(torch.randn(num, 7168, generator=seeded(seed), device=CUDA))
        real.fill_(count)
        graph.replay()
        assert torch.equal(out, step())
        assert not out[count:].any() and (num == 1 or out[:count].any())
