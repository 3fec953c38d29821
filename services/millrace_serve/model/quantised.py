"""The quantised matrices of a checkpoint: how they are stored, which stay so, and what can be made of them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from millrace_kernels.fp8 import BLOCK, Fp8, dequant_blocks
from millrace_kernels.int8 import Int8, Matrix, dequant
from torch import Tensor

from millrace_serve.model.config import ModelConfig

Quantised: TypeAlias = Fp8 | Int8


class Form(NamedTuple):
    dtype: str  # of safetensors
    suffix: str  # of the scales' name, behind the matrix's
    by_block: bool  # float32 scales of 128 x 128 blocks; else [N, 1] of rows
    make: Callable[[Tensor, Tensor], Quantised]


FORMS = {
    "fp8": Form("F8_E4M3", "_scale_inv", True, Fp8),
    "int8": Form("I8", "_scale", False, Int8),
    "int8-block": Form("I8", "_scale_inv", True, Int8),
}


class Kept(NamedTuple):
    """The forms in which a rank keeps the matrices of its checkpoint. None: plain ones, in the compute dtype."""

    matrices: Form | None = None
    experts: Form | None = None  # the stacks of routed experts

    @property
    def fp8(self) -> bool:
        """Whether products run on FP8 weights."""
        return self.matrices is FORMS["fp8"]


PLAIN, FP8 = Kept(), Kept(FORMS["fp8"], FORMS["fp8"])

INT4_GROUP = 32  # columns of a scale


def unpack_int4(packed: Tensor, scales: Tensor) -> Tensor:
    """float32 [N, K] of a matrix that compressed-tensors calls pack-quantized.

    Args: packed: int32 [N, K / 8], each of 8 values from -8 to 7 plus 8, the first one in the lowest 4 bits.
        scales: [N, K / 32]
    """
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    values = ((packed.unsqueeze(-1) >> shifts) & 15) - 8
    return (values.view(*scales.shape, INT4_GROUP) * scales.float().unsqueeze(-1)).view(len(packed), -1)


def form_of(config: ModelConfig) -> Form | None:
    """None: no matrix is quantised, but for INT4 experts."""
    return FORMS["fp8"] if config.fp8_blocks else FORMS.get(config.int8)


def runs_quantised(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether products run on quantised weights themselves: on GPUs, whose kernels give BF16. For other activations,
    and on CPUs, weights are dequantised.
    """
    return device.type == "cuda" and dtype == torch.bfloat16


def kept_forms(config: ModelConfig, quantised: bool) -> Kept:
    """Args: quantised: as of `runs_quantised`. Experts in INT4 become FP8 then."""
    if not quantised:
        return PLAIN
    form = form_of(config)
    return Kept(form, FORMS["fp8"] if config.int4_experts else form)


def plain(matrix: Matrix, dtype: torch.dtype, first_row: int = 0, first_col: int = 0) -> Tensor:
    """[N, K] in dtype; a plain matrix as it is. The rest as in `dequant_blocks`."""
    if isinstance(matrix, Tensor):
        return matrix
    if isinstance(matrix, Int8) and not matrix.by_block:
        return dequant(matrix, dtype)
    return dequant_blocks(matrix.data, matrix.scales, dtype, first_row, first_col)


def stack_rows(parts: Sequence[Matrix], dtype: torch.dtype) -> Matrix:
    """Matrices [N_i, K] on top of each other. Quantised if all are alike and, with scales by block, only the last ends
    inside of a block; else in `dtype`.
    """
    first = parts[0]
    if len(parts) == 1:
        return first
    kinds, by_row = {type(part) for part in parts}, isinstance(first, Int8) and not first.by_block
    whole = by_row or not any(part.data.shape[0] % BLOCK for part in parts[:-1])
    if whole and len(kinds) == 1 and not isinstance(first, Tensor):
        return type(first)(*(torch.cat(of_all) for of_all in zip(*parts, strict=True)))
    return torch.cat([plain(part, dtype) for part in parts])


def tensors(matrix: Matrix) -> Sequence[Tensor]:
    return (matrix,) if isinstance(matrix, Tensor) else matrix


def each(function: Callable[[Tensor], Tensor], matrix: Matrix) -> Matrix:
    return function(matrix) if isinstance(matrix, Tensor) else type(matrix)(*map(function, matrix))
