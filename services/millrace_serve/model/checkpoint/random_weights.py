"""Random weights in the shapes of a checkpoint, made on the device: for benchmarks and for filling compile caches.

A matrix [N, K] has entries of variance 1/K, so activations keep their size through all layers. Routing comes out nearly
uniform over the experts.
"""

import math
from collections.abc import Sequence

import torch
from millrace_kernels.fp8 import BLOCK, E4M3_MAX, Fp8
from millrace_kernels.int8 import INT8_MAX, Matrix
from torch import Tensor

from millrace_serve.model.checkpoint.tensor_file import DTYPES
from millrace_serve.model.quantised import Form, Kept
from millrace_serve.model.weights import WHOLE, Part, Shape, Weights, stays

META = torch.device("meta")
_SIGMAS = 6.0  # the real value of the largest quantised value
_CHUNK = 1 << 26  # elements drawn at a time: 256 MiB, beside the weights themselves


class RandomWeights(Weights):
    """Stands for a `weights.Checkpoint`. On the device `meta`: shapes and dtypes only."""

    def __init__(self, device: torch.device, dtype: torch.dtype, kept: Kept, *, seed: int = 0) -> None:
        self.device, self.dtype, self.kept = device, dtype, kept
        self._generator = None if device == META else torch.Generator(device).manual_seed(seed)

    def tensor(self, name: str, shape: Shape, part: Part = WHOLE, *, dtype: torch.dtype | None = None) -> Tensor:
        """Ones for the weights of norms, zeros for biases, else as a matrix."""
        dtype = dtype or self.dtype
        if len(shape) == 1:
            fill = 0.0 if name.endswith("bias") else 1.0
            return torch.full(shape, fill, dtype=dtype, device=self.device)
        return self._draw(_size(shape, part), 1 / math.sqrt(shape[1]), dtype)

    def matrix(self, name: str, shape: Shape, part: Part = WHOLE) -> Matrix:
        return self._matrix((), shape, part, self.kept.matrices)

    def stack(self, names: Sequence[Sequence[str]], shape: Shape, part: Part = WHOLE) -> Matrix:
        return self._matrix((len(names),), shape, part, self.kept.experts, len(names[0]))

    def claim(self, name: str, shape: Shape, *, optional: bool = False) -> None:
        pass

    def _matrix(self, count: Shape, shape: Shape, part: Part, form: Form | None, stacked: int = 1) -> Matrix:
        """[*count, stacked * rows of the part, its columns]"""
        (rows, cols), std = _size(shape, part), 1 / math.sqrt(shape[1])
        size = (*count, stacked * rows, cols)
        if form is None or not stays(form, shape, part, stacked):
            return self._draw(size, std, self.dtype)
        blocks = (*count, -(-size[-2] // BLOCK), -(-size[-1] // BLOCK))
        unit = (E4M3_MAX if form.make is Fp8 else INT8_MAX) / _SIGMAS
        of_scales = blocks if form.by_block else size[:-1]
        scales = torch.full(of_scales, std / unit, dtype=torch.float32, device=self.device)
        return form.make(self._draw(size, unit, DTYPES[form.dtype]), scales)

    def _draw(self, shape: Shape, std: float, dtype: torch.dtype) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=self.device)
        if self._generator is None:
            return out
        for part in out.view(-1).split(_CHUNK):
            values = torch.randn(part.shape, generator=self._generator, device=self.device, dtype=torch.float32)
            part.copy_(values.mul_(std).clamp_(-_SIGMAS * std, _SIGMAS * std))
        return out


def _size(shape: Shape, part: Part) -> Shape:
    return tuple(end - start for start, end in part.of(shape))
