"""The weights that a part of the model holds, by name.

A part names its weights, and the parts in it, in `WEIGHTS`. What is held but not named there is no weight: counts,
buffers, settings.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, TypeAlias

from millrace_kernels.fp8 import Fp8
from millrace_kernels.int8 import Int8, Matrix
from torch import Tensor

from millrace_serve.model.quantised import tensors
from millrace_serve.model.weights import CheckpointError


class ModelPart(Protocol):
    @property
    def WEIGHTS(self) -> tuple[str, ...]:
        """Names of its attributes, each a Held."""


Held: TypeAlias = ModelPart | Matrix | Sequence["Held"] | None


def named_weights(held: Held, name: str) -> Iterator[tuple[str, Matrix]]:
    """Matrices and vectors with their dotted names. Raises AttributeError for anything that names no weights."""
    if isinstance(held, Tensor | Fp8 | Int8):
        yield name, held
    elif isinstance(held, Sequence):
        for index, part in enumerate(held):
            yield from named_weights(part, f"{name}.{index}")
    elif held is not None:
        for attribute in held.WEIGHTS:
            yield from named_weights(getattr(held, attribute), f"{name}.{attribute}")


def overwrite(old: Held, new: Held, name: str) -> None:
    """Copies the weights of `new` over those of `old`, which the same code has made of another checkpoint.

    Raises:
        CheckpointError: a weight has another form, shape or dtype. Nothing was copied then.
    """
    before, after = dict(named_weights(old, name)), dict(named_weights(new, name))
    for key in before | after:
        if key not in before or key not in after or _form(before[key]) != _form(after[key]):
            raise CheckpointError(f"{key} is stored in another form than the loaded weights")
    for key, matrix in before.items():
        for target, source in zip(tensors(matrix), tensors(after[key]), strict=True):
            target.copy_(source)


def _form(matrix: Matrix) -> tuple[object, ...]:
    return type(matrix), *((tensor.shape, tensor.dtype) for tensor in tensors(matrix))
