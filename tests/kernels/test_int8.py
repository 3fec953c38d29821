"""W8A8 products: the reference against exact arithmetic, our Triton sources through the interpreter, and on a GPU."""

import pytest
import torch
from millrace_kernels.backend import TABLE, forced
from millrace_kernels.fp8 import BLOCK, Operand, dequant_blocks
from millrace_kernels.int8 import Int8, Matrix, dequant, int8_linear, quant_like, quant_rows
from millrace_kernels.linear import linear
from millrace_kernels.moe_experts import moe_experts
from millrace_kernels.testing.attention_inputs import Draw
from millrace_kernels.testing.tolerances import rms_error
from millrace_kernels.triton import int8 as ours
from millrace_testing.tolerances import INT8_LINEAR_TOLERANCE, assert_close

OURS = {op: TABLE[op][0].target for op in ("int8.quant_rows", "int8.int8_linear", "moe_experts.moe_experts_int8")}


def weight_of(n: int, k: int, device: str = "cpu") -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(1)).to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num", [0, 1, 17])
def test_rows_keep_their_largest_value(num: int, dtype: torch.dtype) -> None:
    x = Draw(dtype=dtype).part(num, 200)
    x[3:4] = 0.0
    found = quant_rows(x)
    with forced(**OURS):
        triton = quant_rows(x)
    for data, scales in (found, triton):
        assert data.dtype == torch.int8 and scales.dtype == torch.float32 and scales.shape == (num,)
        assert (data.abs().amax(1) == 127).sum() == (x != 0).any(1).sum() and (scales[3:4] == 1).all()
        assert ((data * scales[:, None]).float() - x.float()).abs().le(scales[:, None] * 0.501).all()
    assert torch.equal(found.data, triton.data) and torch.equal(found.scales, triton.scales)


@pytest.mark.parametrize(("num", "n", "k"), [(0, 64, 128), (1, 72, 200), (17, 130, 384), (70, 64, 128)])
def test_int8_linear_is_exact(num: int, n: int, k: int) -> None:
    x, weight = quant_rows(Draw().part(num, k)), quant_rows(weight_of(n, k))
    exact = (x.data.long() @ weight.data.long().t()).double() * x.scales.double()[:, None] * weight.scales.double()
    stack = Int8(torch.stack((weight.data, weight.data))[1], weight.scales)
    found = int8_linear(x, stack, torch.float32)
    with forced(**OURS):
        triton = int8_linear(x, stack, torch.float32)
        assert int8_linear(x, stack, torch.bfloat16).dtype == torch.bfloat16
    assert_close(found, exact)
    assert_close(triton, exact)
    for chosen in (ours.Int8LinearConfig(16, 64, 4, 3), ours.Int8LinearConfig(64, 128, 8, 2)):
        assert torch.equal(ours.int8_linear(x, stack, torch.float32, chosen), triton)


def test_int8_linear_is_close_to_the_product_of_unquantised_operands() -> None:
    x, weight = Draw(dtype=torch.bfloat16).part(33, 512), weight_of(96, 512)
    found = int8_linear(quant_rows(x), quant_rows(weight), torch.float32)
    assert rms_error(found, x.double() @ weight.double().t()) < INT8_LINEAR_TOLERANCE


def test_sums_that_int32_cannot_hold_are_refused() -> None:
    wide = Int8(torch.zeros(1, 140_000, dtype=torch.int8), torch.ones(1))
    with pytest.raises(AssertionError, match="140000"):
        int8_linear(wide, wide, torch.float32)


def blocks_of(n: int, k: int, device: str = "cpu") -> Int8:
    """Blocks whose scales differ by more than their products' rounding."""
    made = torch.Generator().manual_seed(2)
    scales = torch.rand(-(-n // BLOCK), k // BLOCK, generator=made) * 0.1 + 0.01
    return Int8(torch.randint(-127, 128, (n, k), generator=made, dtype=torch.int8).to(device), scales.to(device))


@pytest.mark.parametrize(("num", "n", "k"), [(0, 64, 128), (1, 72, 256), (17, 130, 384), (70, 140, 128)])
def test_products_with_a_scale_for_each_block(num: int, n: int, k: int) -> None:
    weight = blocks_of(n, k)
    x = quant_like(Draw().part(num, k), weight)
    assert x.by_block and x.scales.shape == (num, k // BLOCK)
    plain = x.data.double() * x.scales.repeat_interleave(BLOCK, 1)
    exact = plain @ dequant_blocks(*weight, torch.float32).double().t()
    found = int8_linear(x, weight, torch.float32)
    with forced(**OURS):
        triton = int8_linear(x, weight, torch.float32)
        assert torch.equal(linear(Draw().part(num, k), weight), triton)
    assert_close(found, exact)
    assert_close(triton, exact)
    assert torch.equal(dequant(weight, torch.float32), dequant_blocks(*weight, torch.float32))


def stacked(weights: list[Int8]) -> Int8:
    return Int8(torch.stack([w.data for w in weights]), torch.stack([w.scales for w in weights]))


def expert_weights(by_block: bool, held: int, dim: int, size: int, device: str = "cpu") -> tuple[Int8, Int8]:
    def draw(n: int, k: int) -> Int8:
        if by_block:
            return Int8(blocks_of(n, k).data, blocks_of(n, k).scales / k)
        return quant_rows(weight_of(n, k) / k**0.5)

    pair = stacked([draw(2 * size, dim)] * held), stacked([draw(dim, size)] * held)
    for weight in pair:
        weight.data.mul_(torch.arange(1, held + 1, dtype=torch.int8)[:, None, None]).clamp_(-127, 127)  # they differ
    return tuple(Int8(w.data.to(device), w.scales.to(device)) for w in pair)  # type: ignore[return-value]


def chosen(num: int, held: int, device: str = "cpu") -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(num)
    ids = torch.randint(-1, held, (num, 3), generator=made, dtype=torch.int32)
    ids[1:2] = -1
    return torch.rand(num, 3, generator=made).to(device), ids.to(device)


def dequantised(weight: Int8) -> Matrix:
    return torch.stack([dequant(Int8(*parts), torch.float32) for parts in zip(*weight, strict=True)])


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, of padding rows
@pytest.mark.parametrize(
    ("num", "shared", "by_block"), [(0, True, False), (3, True, True), (3, False, False), (20, False, True)]
)
def test_experts(num: int, shared: bool, by_block: bool) -> None:
    """Ours and the reference quantise the same rows; both are near the experts of the dequantised weights."""
    held, dim, size = 5, 256, 128
    w13, w2 = expert_weights(by_block, held, dim, size)
    weights, ids = chosen(num, held - shared)
    x = Draw().part(num, dim).contiguous()
    found = moe_experts(Operand(x, None), weights, ids, w13, w2, shared_expert=shared)
    plain = moe_experts(x, weights, ids, dequantised(w13), dequantised(w2), shared_expert=shared)
    assert found.dtype == torch.float32 and found.shape == x.shape
    with forced(**OURS):
        out = torch.full_like(x, torch.nan)
        triton = moe_experts(x, weights, ids, w13, w2, shared_expert=shared, out=out)
    assert triton is out
    if num:
        assert rms_error(found, plain) < 2 * INT8_LINEAR_TOLERANCE and rms_error(triton, found) < 1e-3
    if num and not shared:
        assert not found[1:2].any() and not triton[1:2].any()


@pytest.mark.gpu
@pytest.mark.parametrize("by_block", [False, True])
@pytest.mark.parametrize("num", [0, 1, 16, 200, 4096])
def test_experts_on_a_gpu(num: int, by_block: bool) -> None:
    """In FP32 the reference's rows. BF16 rounds what lies between the products elsewhere, and some of it then goes to
    the next INT8 value: 1.5 % were seen. There they are as near the experts of the dequantised weights.
    """
    w13, w2 = expert_weights(by_block, 8, 1024, 512, "cuda")
    x, (weights, ids) = Draw().part(num, 1024).contiguous().cuda(), chosen(num, 8, "cuda")
    plain = moe_experts(x, weights, ids, dequantised(w13), dequantised(w2))
    with forced(**dict.fromkeys(OURS, "")):
        expected = moe_experts(x, weights, ids, w13, w2)
    assert_close(moe_experts(x, weights, ids, w13, w2), expected, 1e-3)
    if num:
        rounded = moe_experts(x.bfloat16(), weights, ids, w13, w2)
        assert rms_error(rounded, plain) < 2 * INT8_LINEAR_TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("num", [0, 1, 7, 64, 128, 4096])
@pytest.mark.parametrize(("n", "k"), [(2112, 7168), (7168, 16384)])
@pytest.mark.parametrize("by_block", [True, False])
def test_int8_linear_on_a_gpu(num: int, n: int, k: int, by_block: bool) -> None:
    weight = blocks_of(n, k, "cuda") if by_block else quant_rows(weight_of(n, k, "cuda"))
    x = quant_like(Draw(dtype=torch.bfloat16).part(num, k).cuda(), weight)
    with forced(**dict.fromkeys(OURS, "")):
        expected = int8_linear(x, weight, torch.float32)
    assert_close(int8_linear(x, weight, torch.float32), expected, 1e-5)
