"""A rank's first step: products of finite weights may still have a NaN or an infinite number."""

from typing import Any

import torch
from millrace_kernels.fp8 import Operand

from millrace_serve.engine.start import profiling_run
from millrace_serve.engine.start.startup import RankSetup
from millrace_serve.engine.step.torch_runner import TorchRunner
from millrace_serve.model.checkpoint.tensor_file import all_finite
from millrace_serve.model.decoder_layer import DecoderLayer
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.weights import CheckpointError


def check(setup: RankSetup, runner: TorchRunner, model: DeepseekV3) -> None:
    """Collective. Raises CheckpointError, which names the first layer, when the logits of a prompt are not finite."""
    if not _broken(setup, runner):
        return
    layers, found = model.layers, list[int]()
    model.layers = [_Watched(layer, index, found) for index, layer in enumerate(layers)]  # type: ignore[misc]  # they stand for layers
    try:
        _broken(setup, runner)
    finally:
        model.layers = layers
    where = f"layer {found[0]} is the first whose output has one" if found else "the outputs of all layers have none"
    raise CheckpointError(f"the model's logits have a NaN or an infinite number for a first prompt: {where}")


def _broken(setup: RankSetup, runner: TorchRunner) -> bool:
    """The same on every rank. A prompt of a page, because all of its KV goes to one."""
    limits = setup.limits
    length = min(limits.page_size, limits.max_prefill_tokens, limits.max_model_len - 1)
    prompt = profiling_run.StepShape(num_queries=limits.num_queries(1), chunks=1, chunk=length)
    broken = bool(runner.launch(profiling_run.batch_of(prompt, limits, setup.dims.dp)).result().corrupt)
    return any(setup.dims.exchange(b"1" if broken else b""))


class _Watched:
    """A decoder layer whose outputs are looked at; what is found is its index."""

    def __init__(self, layer: DecoderLayer, index: int, found: list[int]) -> None:
        self._layer, self._index, self._found = layer, index, found

    def __getattr__(self, name: str) -> Any:  # of the layer
        return getattr(self._layer, name)

    def __call__(self, *inputs: Any) -> tuple[Operand, torch.Tensor]:  # of the layer
        out, residual = self._layer(*inputs)
        parts = (out.plain, *(out.fp8 or ()))
        if not all(part is None or all_finite(part.flatten()) for part in parts):
            self._found.append(self._index)
        return out, residual
