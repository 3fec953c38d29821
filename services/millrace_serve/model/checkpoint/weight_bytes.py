"""The exact size of a rank's weights before any of them is read: the model is built of tensors without memory.

There is no second list of shards: the modules ask for the same shapes as in a real load.
"""

from __future__ import annotations

import torch

from millrace_serve.model.checkpoint.random_weights import META, RandomWeights
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.held_weights import Held, named_weights
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import Kept, tensors


def weight_bytes(config: ModelConfig, dims: ParallelDims, dtype: torch.dtype, kept: Kept) -> int:
    """Bytes of the weights of rank `dims.rank`. Raises ValueError: the config does not divide by `dims`."""
    return tensor_bytes(DeepseekV3(RandomWeights(META, dtype, kept), config, dims))


def tensor_bytes(held: Held) -> int:
    """Memory of all weights in `held`; views of one memory count once."""
    weights = (tensor for _, matrix in named_weights(held, "") for tensor in tensors(matrix))
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in weights}
    return sum(storage.nbytes() for storage in storages.values())
