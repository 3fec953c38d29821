"""Our side of DeepGEMM's grouped products: a stand-in with its calling conventions takes the library's place."""

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from millrace_kernels.fp8 import Fp8, Operand, fp8_linear
from millrace_kernels.lib import deep_gemm_grouped as grouped
from millrace_kernels.moe_experts import expected_rows, moe_experts
from millrace_kernels.scratch import Scratch
from millrace_kernels.testing.expert_inputs import draw_experts, held_ids
from millrace_kernels.triton import moe_grouped, moe_route
from millrace_kernels.triton.moe_grouped import Launch
from millrace_kernels.triton.moe_rows import permute
from millrace_kernels.triton.quant import quant_groups
from millrace_testing.poison import poison_empty
from millrace_testing.tolerances import FP8_EXPERTS_TOLERANCE, assert_close
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.interpreter import GridExecutor

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of rows that were not written

Pair = tuple[Tensor, Tensor]
DIM, SIZE, HELD, FIRST, TOTAL = 256, 128, 4, 2, 9


class Library(types.ModuleType):
    """What the grouped product of DeepGEMM 0.1.5 checks and does on sm90; rows that they may not read are NaN."""

    def __init__(self) -> None:
        super().__init__("deep_gemm")
        self.alignment = 0
        self.calls = 0

    def set_mk_alignment_for_contiguous_layout(self, value: int) -> None:
        self.alignment = value

    def m_grouped_fp8_gemm_nt_contiguous(
        self, a: Pair, b: Pair, d: Tensor, grouped_layout: Tensor, *,
        use_psum_layout: bool, expected_m_for_psum_layout: int,
    ) -> None:  # fmt: skip
        m, _ = self.check(a, b)
        assert d.shape == (m, b[0].shape[1]) and d.is_contiguous() and a[1].stride() == (1, m) and m % 4 == 0
        assert m % self.alignment == 0
        assert use_psum_layout and grouped_layout.shape == (len(b[0]),) and expected_m_for_psum_layout > 0
        self.calls += 1
        for expert, first, last in self.packed(grouped_layout.tolist()):
            self.multiply(a[0][first:last], a[1][first:last], b, expert, d[first:last])

    def packed(self, ends: list[int]) -> Iterator[tuple[int, int, int]]:
        start = 0
        for expert, end in enumerate(ends):
            assert end >= start, ends
            yield expert, start, end
            start = -(-end // self.alignment) * self.alignment

    @staticmethod
    def check(a: Pair, b: Pair) -> tuple[int, int]:
        assert type(a) is tuple and type(b) is tuple  # it takes no subclass
        m, k = a[0].shape[-2:]
        assert a[0].is_contiguous() and b[0].is_contiguous() and b[1].is_contiguous()
        assert a[0].dtype == b[0].dtype == torch.float8_e4m3fn and a[1].dtype == b[1].dtype == torch.float32
        assert a[1].shape[-2:] == (m, k // 128) and b[1].shape == (len(b[0]), b[0].shape[1] // 128, k // 128)
        return m, k

    @staticmethod
    def multiply(x: Tensor, scales: Tensor, b: Pair, expert: int, d: Tensor) -> None:
        d.copy_(fp8_linear(Fp8(x, scales), Fp8(b[0][expert], b[1][expert]), torch.bfloat16))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    stand_in = Library()
    monkeypatch.setitem(sys.modules, "deep_gemm", stand_in)
    monkeypatch.setattr(moe_grouped, "quant_groups", quant_groups)  # as on a GPU
    poison_empty(monkeypatch)
    return stand_in


@pytest.mark.parametrize("num", [0, 1, 40])
@pytest.mark.parametrize("shared", [False, True])
def test_experts_equal_the_reference(library: Library, num: int, shared: bool) -> None:
    generator = torch.Generator().manual_seed(num)
    x = torch.randn(num, DIM, generator=generator).bfloat16()
    experts = torch.randint(-1, TOTAL, (num, 3), generator=generator, dtype=torch.int32)
    experts[2:3] = 4  # one expert three times
    experts[3:4] = -1
    weights = torch.rand(num, 3, generator=generator)
    w13, w2 = draw_experts(HELD, DIM, SIZE, torch.bfloat16, True, x.device, generator)
    arguments = (x, weights, held_ids(experts, FIRST, HELD - shared), w13, w2)
    out = grouped.moe_experts_fp8(*arguments, shared_expert=shared, num_experts=TOTAL)
    assert out.dtype == torch.bfloat16
    assert_close(out, moe_experts(*arguments, shared_expert=shared), FP8_EXPERTS_TOLERANCE)
    assert library.calls == 2 * (num > 0)


def test_many_tokens_take_turns(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(13, DIM, generator=generator).bfloat16()
    experts = torch.randint(0, HELD, (13, 2), generator=generator, dtype=torch.int32)
    weights = torch.rand(13, 2, generator=generator)
    w13, w2 = draw_experts(HELD, DIM, SIZE, torch.bfloat16, True, x.device, generator)
    quantised = Operand(None, quant_groups(x))
    at_once = grouped.moe_experts_fp8(quantised, weights, experts, w13, w2)
    assert library.calls == 2
    monkeypatch.setattr(grouped, "slices", lambda num, choices: moe_route.slices(num, choices, max_rows=10))
    in_turns = grouped.moe_experts_fp8(quantised, weights, experts, w13, w2)
    assert library.calls == 2 + 2 * 4
    assert torch.equal(at_once, in_turns)


def test_slices_are_few_and_equal() -> None:
    assert moe_route.slices(0, 8) == []
    assert moe_route.slices(13, 2, max_rows=10) == [(0, 4), (4, 8), (8, 12), (12, 13)]
    assert moe_route.slices(16500, 9) == [(0, 8252), (8252, 16500)]  # 4 scales are 16 bytes
    assert moe_route.slices(16384, 9) == [(0, 16384)]
    assert moe_route.slices(131072, 9) == [(first, first + 16384) for first in range(0, 131072, 16384)]


def test_permuted_rows_that_leave_the_cache_first_are_the_same() -> None:
    generator = torch.Generator().manual_seed(0)
    x = quant_groups(torch.randn(20, DIM, generator=generator))
    experts = torch.rand(20, TOTAL, generator=generator).argsort(dim=1)[:, :3].int()
    plan, blocks = moe_route.route(held_ids(experts, FIRST, HELD - 1), HELD, True, 32)
    room = torch.zeros(2, plan.num_rows, DIM).to(torch.float8_e4m3fn)
    tokens = blocks.tokens
    plain, streamed = (permute(x, plan, tokens, out, stream=s) for out, s in zip(room, (False, True), strict=True))
    token, choice = (plan.rows >= 0).nonzero(as_tuple=True)
    rows = plan.rows[token, choice].long()
    assert len(rows) > 20 and len(rows.unique()) == len(rows)
    for found in (plain, streamed):
        assert torch.equal(found.data[rows].float(), x.data[token].float())
        assert torch.equal(found.scales[rows], x.scales[token])


@pytest.mark.parametrize(("rows", "expected"), [(1, 1), (3, 4), (64, 64), (65, 128)])
def test_expected_rows_are_powers_of_two(rows: int, expected: int) -> None:
    assert expected_rows(rows * 4, 2, 8) == expected


def test_tiles_grow_with_the_rows_of_an_expert() -> None:
    for expected, alignment in ((64, 64), (128, 128), (2048, 128), (4096, 256)):
        assert grouped.tile_rows(expected) == alignment


class Launches(TorchDispatchMode):
    """What would be launched on a GPU: our kernels, and PyTorch's but for allocations and views."""

    NOT_LAUNCHED = (
        "empty",
        "new_empty",
        "view",
        "slice",
        "select",
        "transpose",
        "detach",
        "alias",
        "unsqueeze",
        "split",
    )

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.names: list[str] = []
        monkeypatch.setattr(
            GridExecutor, "__call__", lambda kernel, *args, **kwargs: self.names.append(kernel.fn.__name__)
        )

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().removeprefix("aten::")
        if name != "t" and not name.startswith(self.NOT_LAUNCHED):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts the interpreter's launches")
@pytest.mark.parametrize("ours", [False, True])
def test_launches_of_a_layer(ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a step, whose counters are zeroed once for all layers."""
    monkeypatch.setitem(sys.modules, "deep_gemm", library := types.ModuleType("deep_gemm"))
    x, experts = Fp8(torch.zeros(20, DIM).to(torch.float8_e4m3fn), torch.ones(20, DIM // 128)), torch.zeros(20, 2)
    w13, w2 = draw_experts(HELD, DIM, SIZE, torch.bfloat16, True, experts.device, torch.Generator())
    arguments = (Operand(None, x), torch.rand(20, 2), experts.int(), w13, w2)
    with Scratch(experts.device).step(), Launches(monkeypatch) as launches:
        library.set_mk_alignment_for_contiguous_layout = lambda value: None
        library.m_grouped_fp8_gemm_nt_contiguous = lambda *args, **kwargs: launches.names.append("deep_gemm")
        if ours:
            left = Launch(4, 3, left=True)
            moe_grouped.run(*arguments, shared_expert=False, config=moe_grouped.MoeGroupedConfig(32, left, left))
        else:
            grouped.moe_experts_fp8(*arguments)
    between = ["_gate_up_kernel", "_down_kernel"]
    if not ours:
        between = ["_permute_kernel", "deep_gemm", "_silu_mul_quant_kernel", "deep_gemm"]
    assert launches.names == ["_route_few_kernel", *between, "_combine_kernel"]
