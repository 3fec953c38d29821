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


def weight_bytes(config: ModelConfig, dims: ParallelDims, dtype: torch.dtype, *, fp8: bool) -> int:
    """Bytes of the weights of rank `dims.rank`. `fp8`: FP8 matrices stay quantised; INT8 ones do in
    bfloat16, and INT4 experts become FP8 there, as on a GPU.

    Raises:
        ValueError: the config does not divide by `dims`.
    """
    on_gpu = dtype == torch.bfloat16
    weights = RandomWeights(
        META, dtype, fp8=fp8, int8=config.int8 if on_gpu else "", fp8_experts=on_gpu and config.int4_experts
    )
    return tensor_bytes(DeepseekV3(weights, config, dims))


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
