"""Shapes alone: the model is built of tensors without memory, and asks for the same shapes as in a real load.

So a folder, whose headers alone are read, is checked in seconds, whatever its size: each tensor must be there in its
shape. And the exact size of a rank's weights is known before any of them is read.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from millrace_kernels.int8 import Matrix
from torch import Tensor

from millrace_serve.model.checkpoint.random_weights import META, RandomWeights
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3, open_checkpoint
from millrace_serve.model.held_weights import Held, named_weights
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import Kept, tensors
from millrace_serve.model.weights import WHOLE, Checkpoint, Part, Shape


class Headers(RandomWeights):
    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(META, checkpoint.dtype, checkpoint.kept)
        self._checkpoint = checkpoint

    def tensor(self, name: str, shape: Shape, part: Part = WHOLE, *, dtype: torch.dtype | None = None) -> Tensor:
        self.claim(name, shape)
        return super().tensor(name, shape, part, dtype=dtype)

    def matrix(self, name: str, shape: Shape, part: Part = WHOLE) -> Matrix:
        self.claim(name, shape)
        return super().matrix(name, shape, part)

    def stack(self, names: Sequence[Sequence[str]], shape: Shape, part: Part = WHOLE) -> Matrix:
        for name in (name for entry in names for name in entry):
            self.claim(name, shape)
        return super().stack(names, shape, part)

    def claim(self, name: str, shape: Shape, *, optional: bool = False) -> None:
        self._checkpoint.claim(name, shape, optional=optional)


def check_headers(directory: Path, *, mtp: bool = True) -> None:
    """Raises CheckpointError, which names the tensor, when the weights are not those that config.json describes.

    mtp: as in `load_model`.
    """
    with open_checkpoint(directory, META, torch.bfloat16, keep_quantised=True, mtp=mtp) as (checkpoint, config):
        DeepseekV3(Headers(checkpoint), config, ParallelDims())


def weight_bytes(config: ModelConfig, dims: ParallelDims, dtype: torch.dtype, kept: Kept) -> int:
    """Bytes of the weights of rank `dims.rank`. Raises ValueError: the config does not divide by `dims`."""
    return tensor_bytes(DeepseekV3(RandomWeights(META, dtype, kept), config, dims))


def tensor_bytes(held: Held) -> int:
    """Memory of all weights in `held`; views of one memory count once."""
    weights = (tensor for _, matrix in named_weights(held, "") for tensor in tensors(matrix))
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in weights}
    return sum(storage.nbytes() for storage in storages.values())
