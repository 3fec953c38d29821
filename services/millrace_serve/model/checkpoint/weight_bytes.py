"""The exact size of a rank's weights before any of them is read: the model is built of tensors without memory.

There is no second list of shards: the modules ask for the same shapes as in a real load.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from millrace_serve.model.checkpoint.random_weights import META, RandomWeights
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.quantised import Kept


def weight_bytes(config: ModelConfig, dims: ParallelDims, dtype: torch.dtype, kept: Kept) -> int:
    """Bytes of the weights of rank `dims.rank`. Raises ValueError: the config does not divide by `dims`."""
    return tensor_bytes(DeepseekV3(RandomWeights(META, dtype, kept), config, dims))


def tensor_bytes(thing: object) -> int:
    """Memory of all tensors that can be reached from `thing`; views of one memory count once."""
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in _tensors(thing, set())}
    return sum(storage.nbytes() for storage in storages.values())


def _tensors(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(thing, Tensor):
        yield thing
    elif id(thing) in seen:
        return
    elif isinstance(thing, list | tuple | dict):
        seen.add(id(thing))
        for part in thing.values() if isinstance(thing, dict) else thing:
            yield from _tensors(part, seen)
    elif type(thing).__module__.startswith("millrace"):
        seen.add(id(thing))
        names = getattr(thing, "__slots__", ()) or vars(thing)
        for name in names:
            yield from _tensors(getattr(thing, name), seen)
