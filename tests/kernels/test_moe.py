"""Gate and experts against one token at a time."""

import pytest
import torch
from millrace_kernels.fp8 import Operand, quant_groups
from millrace_kernels.lib import cublas
from millrace_kernels.moe_experts import moe_experts
from millrace_kernels.moe_gate import moe_gate
from millrace_kernels.testing.expert_inputs import draw_experts, held_ids, rule_of
from millrace_kernels.testing.shapes import TINY, V3_TP8, Dims
from millrace_testing.tolerances import assert_close
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode


def gate(logits: Tensor, bias: Tensor, dims: Dims, norm: bool = True, scaling: float = 2.5) -> tuple[Tensor, Tensor]:
    return moe_gate(logits, bias, rule_of(dims, norm, scaling))


def naive_gate(logits: list[float], bias: list[float], dims: Dims, norm: bool, scaling: float) -> dict[int, float]:
    """Python floats and sorted(), which is stable: lower index first among equals."""
    scores = torch.tensor(logits).sigmoid().tolist()
    choice = [s + b for s, b in zip(scores, bias, strict=True)]
    size = dims.experts // dims.groups
    group_of = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(dims.groups)]
    groups = sorted(range(dims.groups), key=lambda g: -group_of[g])[: dims.topk_groups]
    allowed = sorted(e for g in groups for e in range(g * size, (g + 1) * size))
    chosen = sorted(allowed, key=lambda e: -choice[e])[: dims.top_k]
    total = sum(scores[e] for e in chosen) if norm else 1.0
    return {e: scores[e] / total * scaling for e in chosen}


@pytest.mark.parametrize(
    ("num", "dims", "norm"),
    [(0, TINY, True), (1, TINY, False), (40, TINY, True), (7, V3_TP8, True), (3, V3_TP8, False)],
)
def test_gate(num: int, dims: Dims, norm: bool) -> None:
    generator = torch.Generator().manual_seed(num)
    logits = torch.randn(num, dims.experts, generator=generator)
    bias = torch.randn(dims.experts, generator=generator) * 0.1
    weights, experts = gate(logits, bias, dims, norm)
    assert weights.shape == experts.shape == (num, dims.top_k) and weights.dtype == torch.float32
    for row in range(num):
        expected = naive_gate(logits[row].tolist(), bias.tolist(), dims, norm, 2.5)
        assert experts[row].tolist() == list(expected)
        assert_close(weights[row], torch.tensor(list(expected.values())))


def test_gate_gives_ties_to_the_lower_index() -> None:
    logits, bias = torch.zeros(3, TINY.experts), torch.zeros(TINY.experts)
    logits[1, 9] = logits[1, 13] = 1.0  # groups 2 and 3 lead; inside of them the leaders, then the lowest
    logits[2, 15] = 1.0  # group 3 leads; groups 0, 1 and 2 tie for the second place
    _, experts = gate(logits, bias, TINY)
    assert experts.tolist() == [[0, 1, 2, 3], [9, 13, 8, 10], [15, 0, 1, 2]]


def test_gate_bias_steers_the_choice_and_not_the_weight() -> None:
    logits, bias = torch.zeros(1, TINY.experts), torch.zeros(TINY.experts)
    bias[12:] = 5.0
    weights, experts = gate(logits, bias, TINY, scaling=1.0)
    assert experts.tolist() == [[12, 13, 14, 15]]
    assert_close(weights, torch.full((1, 4), 0.25))


def test_gate_counts_the_choices_of_real_rows() -> None:
    logits, loads = torch.randn(5, TINY.experts, generator=torch.Generator().manual_seed(0)), torch.zeros(2, 16).int()
    for step in (0, 1):
        _, experts = moe_gate(logits, torch.zeros(16), rule_of(TINY), torch.tensor([3], dtype=torch.int32), loads[1])
        assert loads[1].tolist() == [(step + 1) * experts[:3].flatten().tolist().count(e) for e in range(16)]
    assert not loads[0].any()


@pytest.mark.parametrize(("num", "first", "count"), [(0, 0, 16), (1, 4, 8), (7, 0, 16), (40, 15, 1), (70, 4, 8)])
def test_experts(num: int, first: int, count: int) -> None:
    generator = torch.Generator().manual_seed(num)
    hidden, size = TINY.hidden, TINY.moe_intermediate
    x = torch.randn(num, hidden, generator=generator)
    experts = torch.rand(num, 16, generator=generator).argsort(dim=1)[:, : TINY.top_k].int()  # distinct per token
    experts[: num // 7] = -1  # padding rows
    weights = torch.rand(num, TINY.top_k, generator=generator)
    w13 = torch.randn(count, 2 * size, hidden, generator=generator) * 0.06
    w2 = torch.randn(count, hidden, size, generator=generator) * 0.09
    expected = torch.zeros(num, hidden, dtype=torch.float64)
    for token in range(num):
        for weight, expert in zip(weights[token].tolist(), experts[token].tolist(), strict=True):
            if first <= expert < first + count:
                gate_up = w13[expert - first].double() @ x[token].double()
                act = gate_up[:size] * gate_up[:size].sigmoid() * gate_up[size:]
                expected[token] += weight * (w2[expert - first].double() @ act)
    out = moe_experts(x, weights, held_ids(experts, first, count), w13, w2)
    assert out.dtype == x.dtype
    assert_close(out, expected)
    assert (out[: num // 7] == 0).all()


def test_experts_ignore_what_padding_rows_hold() -> None:
    x = torch.full((2, TINY.hidden), torch.nan)
    x[1] = 1.0
    experts = torch.tensor([[-1, -1], [0, 1]], dtype=torch.int32)
    w13, w2 = torch.ones(2, 2 * 8, TINY.hidden), torch.ones(2, TINY.hidden, 8)
    out = moe_experts(x, torch.ones(2, 2), experts, w13, w2)
    assert (out[0] == 0).all() and out[1].isfinite().all()


@pytest.mark.parametrize(
    ("num", "shared", "fp8"),
    [(0, False, True), (1, True, False), (7, False, False), (7, True, True), (40, True, False)],
)
def test_every_expert_for_every_token(num: int, shared: bool, fp8: bool) -> None:
    """What runs on a GPU where no kernel takes the experts: float32, and FP8 that ends inside of a block."""
    generator, held = torch.Generator().manual_seed(num), 5
    w13, w2 = draw_experts(held, TINY.hidden, 72, torch.float32, fp8, torch.device("cpu"), generator)
    x = torch.randn(num, TINY.hidden, generator=generator)
    experts = torch.randint(-1, 16, (num, 4), generator=generator, dtype=torch.int32)
    experts[1:2], experts[2:3] = -1, 6  # no expert, and one expert four times
    weights = torch.rand(num, 4, generator=generator)
    x[1:2] = torch.nan if not shared else 1.0
    operand = Operand(x, quant_groups(x) if fp8 else None)
    arguments = (operand, weights, held_ids(experts, 3, held - shared), w13, w2)
    found = cublas.moe_experts_other(*arguments, shared_expert=shared)
    assert_close(found, moe_experts(*arguments, shared_expert=shared))


def test_graph_may_hold_every_expert_for_every_token() -> None:
    """Without values there is nothing that the host could wait for; the reference sorts the choices on the host."""
    with FakeTensorMode():
        w13, w2 = torch.empty(5, 2 * 72, TINY.hidden), torch.empty(5, TINY.hidden, 72)
        experts, weights = torch.empty(7, 4, dtype=torch.int32), torch.empty(7, 4)
        arguments = (torch.empty(7, TINY.hidden), weights, experts, w13, w2)
        assert cublas.moe_experts_other(*arguments).shape == (7, TINY.hidden)
        with pytest.raises(Exception, match=r"aten\.(bincount|_local_scalar_dense)"):
            moe_experts(*arguments)
