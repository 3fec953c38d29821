"""FP8 E4M3 with block scales, as DeepSeek-V3 was trained and published: real value = FP8 value * scale.

Activations carry one scale per row and 128 columns, weights one per 128 x 128 block (`weight_scale_inv`).
Edge blocks may be smaller than 128.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from millrace_kernels.backend import SMALL_TOKENS, implementation

BLOCK = 128
E4M3_MAX = 448.0
NOTHING = 1e-30  # a group or block without a larger value counts as zeros: the inverse of its scale would overflow


class Fp8(NamedTuple):
    """A quantised matrix, or a stack of them."""

    data: Tensor  # E4M3 [..., N, K]
    scales: Tensor  # float32, of 1 x 128 groups [T, K/128] or of 128 x 128 blocks [..., N/128, K/128]; any strides


class Operand(NamedTuple):
    """The rows x [T, K] of a GEMM's input, plain or in FP8 or both; at least one form is present."""

    plain: Tensor | None
    fp8: Fp8 | None


def quant_groups(x: Tensor) -> Fp8:
    """x [T, K] -> E4M3 [T, K], scales float32 [T, ceil(K/128)]. scale = max|x| / 448, or 1 for a group of zeros.

    x is bfloat16 or float32; rows may be strided. On CUDA the scales lie column by column (strides 1 and T rounded up
    to 4), as the FP8 GEMMs read them.
    """
    assert x.dim() == 2 and x.dtype in (torch.bfloat16, torch.float32), (x.shape, x.dtype)
    run = implementation("fp8.quant_groups", x.device, x.shape[0])
    return run(x) if run else reference_quant_groups(x)


def reference_quant_groups(x: Tensor) -> Fp8:
    groups = _pad(x.float(), 1, BLOCK).unflatten(1, (-1, BLOCK))  # [T, K/128, 128]
    scales = _scale(groups.abs().amax(-1))
    quantized = (groups / scales.unsqueeze(-1)).flatten(1)[:, : x.shape[1]]
    return Fp8(quantized.to(torch.float8_e4m3fn), scales)


def quant_blocks(weight: Tensor) -> Fp8:
    """weight [N, K] -> E4M3 [N, K], scales float32 [ceil(N/128), ceil(K/128)]."""
    blocks = _pad(weight.float(), BLOCK, BLOCK).unflatten(1, (-1, BLOCK)).unflatten(0, (-1, BLOCK))  # [n, 128, k, 128]
    scales = _scale(blocks.abs().amax((1, 3)))  # [n, k]
    quantized = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)
    return Fp8(quantized[: weight.shape[0], : weight.shape[1]].to(torch.float8_e4m3fn).contiguous(), scales)


def dequant_blocks(
    weight: Tensor, scales: Tensor, dtype: torch.dtype, first_row: int = 0, first_col: int = 0
) -> Tensor:
    """weight E4M3 or int8 [N, K] -> [N, K] in dtype.

    `scales` belong to the blocks that the slice touches; first_row and first_col are where the slice begins inside
    of the first of them, so a rank's shard need not begin at a block.
    """
    assert 0 <= first_row < BLOCK and 0 <= first_col < BLOCK, (first_row, first_col)
    values, (n, k) = weight.to(torch.float32, memory_format=torch.contiguous_format), weight.shape
    if first_row == 0 and first_col == 0 and n % BLOCK == 0 and k % BLOCK == 0:  # the same, without a [N, K] of scales
        values.view(n // BLOCK, BLOCK, k // BLOCK, BLOCK).mul_(scales[:, None, :, None])
        return values.to(dtype)
    rows = (torch.arange(n, device=weight.device) + first_row) // BLOCK
    cols = (torch.arange(k, device=weight.device) + first_col) // BLOCK
    return values.mul_(scales[rows][:, cols]).to(dtype)


def fp8_linear(x: Fp8, weight: Fp8, dtype: torch.dtype) -> Tensor:
    """out = sum over 128-column blocks of (x_blk w_blk^T) * x_scale * w_scale, accumulated in FP32.

    Args:
        x: E4M3 [T, K] with scales of 1 x 128 groups.
        weight: E4M3 [N, K] with scales of 128 x 128 blocks; may be a slice of a stack.
    Returns:
        [T, N] in dtype.
    """
    _check(x.data, weight)
    assert x.scales.shape == (x.data.shape[0], weight.scales.shape[1]), (x.scales.shape, weight.scales.shape)
    if run := implementation("fp8.fp8_linear", x.data.device, x.data.shape[0], tuple(weight.data.shape)):
        return run(x, weight, dtype)
    row_scales = weight.scales.repeat_interleave(BLOCK, 0)[: weight.data.shape[0]]  # [N, K/128]
    out = torch.zeros(x.data.shape[0], weight.data.shape[0], dtype=torch.float32, device=x.data.device)
    for block in range(x.scales.shape[1]):
        cols = slice(block * BLOCK, (block + 1) * BLOCK)
        partial = F.linear(x.data[:, cols].float(), weight.data[:, cols].float())
        out += partial * x.scales[:, block : block + 1] * row_scales[:, block]
    return out.to(dtype)


def compile_ahead(max_tokens: int, device: torch.device, start: float = 0.0) -> int:
    """Compile the kernels of `fp8_linear` for 1 to max_tokens rows of each weight shape that it has met so far, where
    the number of rows decides the kernel. Returns the number of those shapes.

    Args: start: offset in [0, 1) at which the list begins, wrapping around, so that processes with one cache begin
        apart.
    """
    run = implementation("fp8.compile_ahead", device, max_tokens)
    return run(max_tokens, device, start) if run else 0


def small_linear(x: Tensor, weight: Fp8) -> Tensor:
    """out = x dequantised(weight)^T for few rows: its cost is one read of the weight.

    Args:
        x: [T, K] with T <= SMALL_TOKENS, not quantised; rows may be strided.
        weight: E4M3 [N, K] with scales of 128 x 128 blocks; may be a slice of a stack.
    Returns:
        [T, N] in x's dtype, accumulated in FP32 in an order that depends on the shape alone.
    """
    _check(x, weight)
    assert x.shape[0] <= SMALL_TOKENS, x.shape
    run = implementation("fp8.small_linear", x.device, x.shape[0])
    return run(x, weight) if run else reference_small_linear(x, weight)


def reference_small_linear(x: Tensor, weight: Fp8) -> Tensor:
    return F.linear(x.float(), dequant_blocks(*weight, torch.float32)).to(x.dtype)


def _pad(x: Tensor, row_multiple: int, col_multiple: int) -> Tensor:
    return F.pad(x, (0, -x.shape[1] % col_multiple, 0, -x.shape[0] % row_multiple))


def _scale(largest: Tensor) -> Tensor:
    limit = largest.new_full((), E4M3_MAX)  # a tensor: by a number, a GPU multiplies with the rounded inverse
    return torch.where(largest > NOTHING, largest / limit, torch.ones_like(largest))


def _check(x: Tensor, weight: Fp8) -> None:
    (n, k), blocks = weight.data.shape, weight.scales.shape
    assert x.dim() == 2 and x.shape[1] == k and blocks == (-(-n // BLOCK), -(-k // BLOCK)), (x.shape, (n, k), blocks)
