"""What one measurement of an optimisation is: two calls on the same inputs, with it and without it.

The calls without it are what a plain implementation launches. Each still takes the fastest kernel for every one of its
parts, so only the optimisation itself makes the difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from millrace_kernels.testing.shapes import TINY, V3_TP8, Dims
from millrace_kernels.testing.tolerances import rms_error
from torch import Tensor

Call = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Pair:
    """An optimisation at one shape."""

    seed: str
    shape: str
    make: Callable[[], tuple[Call, Call]]  # draws inputs -> with, without
    nbytes: float  # that a call reads
    tolerance: float = 1e-2  # of the two results, as rms_error; BF16 sums in another order

    def difference(self, on: Call, off: Call) -> float:
        pairs = zip(on(), off(), strict=True)
        return max(_error(one.float(), other.float()) for one, other in pairs)


def _error(one: Tensor, other: Tensor) -> float:
    """Infinities must be at the same places; a merged state of no keys has them."""
    finite = one.isfinite()
    return rms_error(one[finite], other[finite]) if torch.equal(finite, other.isfinite()) else math.inf


@dataclass(frozen=True, slots=True)
class Sizes:
    tokens: tuple[int, ...]
    dims: Dims
    heads: tuple[int, ...]
    contexts: tuple[int, ...]
    q_rank: int
    products: tuple[tuple[int, int], ...]  # weights [N, K] of a rank


FULL = Sizes((1, 16, 128), V3_TP8, (16, 128), (1024, 4096, 32768), 1536, ((24576, 1536), (7168, 16384)))
SMALL = Sizes((3, 20), TINY, (2,), (70,), 256, ((256, 256),))


def sizes(tiny: bool) -> Sizes:
    return SMALL if tiny else FULL


MakePairs = Callable[[Sizes, torch.device], Iterator[Pair]]
