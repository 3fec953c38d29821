"""Our kernels for the gate and the experts, through Triton's interpreter, against the references."""

from types import ModuleType

import pytest
import torch
from millrace_kernels import moe_experts as ref_experts
from millrace_kernels import moe_gate as ref_gate
from millrace_kernels.backend import SMALL_TOKENS
from millrace_kernels.expert_slots import expert_slots
from millrace_kernels.fp8 import Operand, quant_groups
from millrace_kernels.testing.expert_inputs import Experts, draw_experts, held_ids, rule_of
from millrace_kernels.testing.shapes import TINY, V3_TP8, Dims
from millrace_kernels.triton import expert_slots as triton_slots
from millrace_kernels.triton import moe_gate, moe_grouped, moe_route, moe_small
from millrace_kernels.triton.moe_grouped import Launch
from millrace_testing.poison import poison_empty
from millrace_testing.tolerances import FP8_EXPERTS_TOLERANCE, assert_close
from torch import Tensor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of NaN in padding rows

CPU = torch.device("cpu")
ODD = Dims("odd", 200, heads=1, experts=18, groups=3, topk_groups=2, top_k=3, moe_intermediate=72)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize(
    ("num", "dims", "norm", "padded"),
    [(0, V3_TP8, True, True), (1, TINY, False, False), (1, V3_TP8, True, False), (7, TINY, True, True),
     (7, V3_TP8, False, True), (7, ODD, False, False), (7, ODD, True, True)],
)  # fmt: skip
def test_gate(num: int, dims: Dims, norm: bool, padded: bool) -> None:
    logits = torch.randn(num, dims.experts, generator=seeded(num))
    logits[3:4] = 0.0  # ties everywhere
    logits[4:5, ::3] = 1.0
    bias = torch.randn(dims.experts, generator=seeded(1)) * 0.1
    bias[: dims.experts // 2] = 0.0
    rule = rule_of(dims, norm)
    real = torch.tensor([5], dtype=torch.int32) if padded else None
    if padded:
        logits[5:] = torch.nan
    for given in (logits, torch.stack((logits, logits, -logits))):  # whole, and in parts whose sum is exact
        loads, expected_loads = torch.full((2, dims.experts), 9, dtype=torch.int32)
        weights, experts = moe_gate.moe_gate(given, bias, rule, real, loads)
        expected_weights, expected_experts = ref_gate.moe_gate(given, bias, rule, real, expected_loads)
        assert torch.equal(experts, expected_experts) and experts.dtype == torch.int32
        assert torch.equal(loads, expected_loads)
        assert_close(weights, expected_weights)


@pytest.mark.parametrize("num", [0, 1, 70])
@pytest.mark.parametrize("turns", [1, 24])
def test_expert_slots(num: int, turns: int) -> None:
    table = torch.randint(-1, 33, (turns, 257), generator=seeded(turns), dtype=torch.int32)
    table[:, -1] = -1
    ids = torch.randint(-1, 256, (num, 8), generator=seeded(num), dtype=torch.int32)
    assert torch.equal(triton_slots.expert_slots(ids, table), expert_slots(ids, table))


@pytest.mark.parametrize("num", [0, 1, 35])
def test_gate_logits(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(num, 608, generator=seeded(num)).bfloat16()[:, :600]  # whose last part is not whole
    weight = torch.randn(70, 600, generator=seeded(1)).bfloat16()
    poison_empty(monkeypatch)
    found = moe_gate.gate_logits(x, weight)
    assert found.shape == (3, num, 70)
    assert_close(found.sum(0), ref_gate.gate_logits(x, weight))
    assert_close(moe_gate.gate_logits(x.float(), weight), ref_gate.gate_logits(x, weight))


def choices(num: int, held: int, seed: int) -> tuple[Tensor, Tensor]:
    """Three of 9 experts, of which the rank holds those from the third on; some named twice, and a padding row."""
    experts = torch.randint(-1, 9, (num, 3), generator=seeded(seed), dtype=torch.int32)
    experts[1:2] = -1
    experts[2:3, :2] = 4
    return torch.rand(num, 3, generator=seeded(seed)), held_ids(experts, 2, held)


def case(
    num: int, dim: int, size: int, dtype: torch.dtype, fp8: bool, shared: bool = False
) -> tuple[Tensor, Tensor, Tensor, Experts]:
    x = torch.randn(num, dim, generator=seeded(num)).to(dtype)
    x[1:2] = 0.0 if shared else torch.nan  # the padding row, which only a shared expert sees
    return x, *choices(num, 4 - shared, num), draw_experts(4, dim, size, dtype, fp8, CPU, seeded(7))


@pytest.mark.parametrize(
    ("kernel", "num", "shared", "fp8"),
    [(moe_small, 0, False, False), (moe_small, 1, True, False), (moe_small, 4, False, False),
     (moe_small, 5, True, False), pytest.param(moe_small, 5, True, True, marks=pytest.mark.long),
     (moe_grouped, 0, False, False), (moe_grouped, 1, True, False), (moe_grouped, 21, False, False),
     (moe_grouped, 21, True, False)],
)  # fmt: skip
def test_experts(kernel: ModuleType, num: int, shared: bool, fp8: bool) -> None:
    x, weights, experts, (w13, w2) = case(num, *((256, 128) if fp8 else (136, 24)), torch.bfloat16, fp8, shared)
    arguments = (x, weights, experts, w13, w2)
    out = kernel.moe_experts(*arguments, shared_expert=shared, num_experts=9)
    assert out.dtype == x.dtype
    assert_close(out, ref_experts.moe_experts(*arguments, shared_expert=shared))


def test_small_in_fp32_multiplies_one_token_exactly() -> None:
    x, weights, _, (w13, w2) = case(1, 128, 128, torch.float32, True)
    arguments = (x, weights, torch.tensor([[0, 3, 2]], dtype=torch.int32), w13, w2)
    assert_close(moe_small.moe_experts(*arguments), ref_experts.moe_experts(*arguments))


LEFT = moe_grouped.MoeGroupedConfig(32, Launch(4, 3, left=True), Launch(4, 3, 64, left=True))


@pytest.mark.parametrize(
    ("num", "shared", "config"),
    [(1, True, moe_grouped.CONFIGS[16]), (21, False, moe_grouped.CONFIGS[16]), (21, True, LEFT)],
)
def test_grouped_fp8(
    num: int, shared: bool, config: moe_grouped.MoeGroupedConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weights, experts, (w13, w2) = case(num, 256, 128, torch.bfloat16, True, shared)
    quantised = Operand(None, quant_groups(x))
    expected = ref_experts.moe_experts(x, weights, experts, w13, w2, shared_expert=shared)
    poison_empty(monkeypatch)
    out = moe_grouped.run(quantised, weights, experts, w13, w2, shared_expert=shared, config=config)
    assert_close(out, expected, FP8_EXPERTS_TOLERANCE)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize(("num", "shared"), [(1, True), (21, False), (33, True)])
def test_route(few: bool, num: int, shared: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one launch and in two; rows of an expert in any order."""
    monkeypatch.setattr(moe_route, "FEW_TOKENS", num if few else 0)
    poison_empty(monkeypatch)
    (_, experts), held = choices(num, 4, num), 4 + shared
    scales = torch.randn(5, num, generator=seeded(num)).t()
    plan, blocks = moe_route.route(experts, held, shared, 16, scales=scales)
    wanted = [sorted({t for t in range(num) if e in experts[t]}) for e in range(4)]
    wanted += [list(range(num))] * shared
    start = 0
    for expert, tokens in enumerate(wanted):
        end = start + len(tokens)
        assert plan.ends[expert] == end
        found = blocks.tokens[start:end].tolist()
        assert sorted(found) == tokens and (found == tokens or not few)
        assert torch.equal(blocks.scales[:, start:end], scales[blocks.tokens[start:end]].t())
        assert (blocks.experts[start // 16 : -(-end // 16)] == expert).all()
        for row, token in enumerate(found, start):
            named = experts[token] == expert if expert < 4 else torch.arange(4) == 3
            assert named.any() and (plan.rows[token][: len(named)][named] == row).all()
        start = -(-end // 16) * 16
    assert (plan.rows[:, :3][experts < 0] == -1).all()
    assert plan.total == start and plan.num_rows >= start


def test_measured_configurations_are_for_what_an_expert_expects() -> None:
    for (rows, num_held, size), config in moe_grouped.MEASURED.rows.items():
        assert moe_grouped.is_fastest(SMALL_TOKENS + 1, (num_held, 7168, size, rows))
        assert moe_grouped.config(rows, num_held, size) == config
    assert not moe_grouped.is_fastest(SMALL_TOKENS + 1, (5, 7168, 256, 1))
    assert moe_grouped.config(48, 5, 256) == moe_grouped.CONFIGS[64]


def test_few_tokens_take_the_kernels_for_few_where_experts_are_small() -> None:
    assert [num for num in (1, 2, 3, 4, SMALL_TOKENS) if moe_grouped.is_fastest(num, (256, 7168, 256, 1))] == [16]
    assert moe_grouped.is_fastest(1, (33, 7168, 2048, 1))


def test_weights_as_the_left_operand_want_rows() -> None:
    x, weights, experts, (w13, w2) = case(5, 256, 128, torch.bfloat16, fp8=True)
    operand, config = Operand(None, quant_groups(x)), moe_grouped.MoeGroupedConfig(16, *[Launch(4, 3, left=True)] * 2)
    with pytest.raises(AssertionError, match="block_m 16: with the weight as left operand 32 or more"):
        moe_grouped.run(operand, weights, experts, w13, w2, shared_expert=False, config=config)


def test_nobody_reads_memory_that_nobody_wrote(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weights, experts, (w13, w2) = case(5, 256, 128, torch.bfloat16, fp8=True)
    expected = ref_experts.moe_experts(x, weights, experts, w13, w2)
    poison_empty(monkeypatch)
    assert_close(moe_small.moe_experts(x, weights, experts, w13, w2), expected)
    assert_close(moe_grouped.moe_experts(x, weights, experts, w13, w2), expected, FP8_EXPERTS_TOLERANCE)
