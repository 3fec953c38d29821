"""Random weights in the shapes of a checkpoint, made on the device: for benchmarks and for filling compile caches.

A matrix [N, K] has entries of variance 1/K, so activations keep their size through all layers. Routing comes out nearly
uniform over the experts. A name is the seed of its numbers. So an expert is the same in each slot of each rank, and the
order of reads changes nothing.
"""

import math
import zlib
from collections.abc import Sequence

import torch
from millrace_kernels.fp8 import BLOCK, E4M3_MAX, Fp8
from millrace_kernels.int8 import INT8_MAX, Matrix
from torch import Tensor

from millrace_serve.model.checkpoint.tensor_file import DTYPES
from millrace_serve.model.quantised import Form, Kept, each
from millrace_serve.model.weights import WHOLE, Part, Shape, Weights, stays

META = torch.device("meta")
_SIGMAS = 6.0  # the real value of the largest quantised value
_CHUNK = 1 << 26  # elements drawn at a time: 256 MiB, beside the weights themselves


class RandomWeights(Weights):
    """Stands for a `weights.Checkpoint`. On the device `meta`: shapes and dtypes only."""

    def __init__(self, device: torch.device, dtype: torch.dtype, kept: Kept) -> None:
        self.device, self.dtype, self.kept = device, dtype, kept

    def tensor(self, name: str, shape: Shape, part: Part = WHOLE, *, dtype: torch.dtype | None = None) -> Tensor:
        """Ones for the weights of norms, zeros for biases, else as a matrix."""
        dtype = dtype or self.dtype
        if len(shape) == 1:
            return torch.full(shape, float(not name.endswith("bias")), dtype=dtype, device=self.device)
        return self._draw([name], _size(shape, part), 1 / math.sqrt(shape[1]), dtype)

    def matrix(self, name: str, shape: Shape, part: Part = WHOLE) -> Matrix:
        return each(lambda one: one[0], self._stack([[name]], shape, part, self.kept.matrices))

    def stack(self, names: Sequence[Sequence[str]], shape: Shape, part: Part = WHOLE) -> Matrix:
        return self._stack(names, shape, part, self.kept.experts)

    def claim(self, name: str, shape: Shape, *, optional: bool = False) -> None:
        pass

    def _stack(self, names: Sequence[Sequence[str]], shape: Shape, part: Part, form: Form | None) -> Matrix:
        """[len(names), rows of the part of all names of an entry, its columns]"""
        (rows, cols), std, firsts = _size(shape, part), 1 / math.sqrt(shape[1]), [first for first, *_ in names]
        size = (len(names), len(names[0]) * rows, cols)
        if form is None or not stays(form, shape, part, len(names[0])):
            return self._draw(firsts, size, std, self.dtype)
        unit = (E4M3_MAX if form.make is Fp8 else INT8_MAX) / _SIGMAS
        of_scales = (len(names), *(-(-edge // BLOCK) for edge in size[1:])) if form.by_block else size[:-1]
        scales = torch.full(of_scales, std / unit, dtype=torch.float32, device=self.device)
        return form.make(self._draw(firsts, size, unit, DTYPES[form.dtype]), scales)

    def _draw(self, names: Sequence[str], shape: Shape, std: float, dtype: torch.dtype) -> Tensor:
        out = torch.empty(shape, dtype=dtype, device=self.device)
        if self.device == META:
            return out
        for name, whole in zip(names, out.view(len(names), -1), strict=True):
            generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
            for part in whole.split(_CHUNK):
                values = torch.randn(part.shape, generator=generator, device=self.device, dtype=torch.float32)
                part.copy_(values.mul_(std).clamp_(-_SIGMAS * std, _SIGMAS * std))
        return out


def _size(shape: Shape, part: Part) -> Shape:
    return tuple(end - start for start, end in part.of(shape))
