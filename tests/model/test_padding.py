"""Padding rows reach no expert; a step of the model shares its counters, and reads h once in an attention."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from millrace_kernels import scratch
from millrace_kernels.fp8 import Operand
from millrace_serve.model import mla
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3
from millrace_serve.model.eplb.placement import ExpertPlacement
from millrace_serve.model.experts.gather import GatherExperts
from millrace_serve.model.experts.held import ExpertLayer
from millrace_serve.model.experts.local import LocalExperts
from millrace_serve.model.inputs import AttnPlan, ForwardInput
from millrace_serve.model.moe import Moe
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.weights import Checkpoint
from torch import Tensor

CPU = torch.device("cpu")
LAYER, EXPERTS = 1, 16


def step(rows: int, **fields: Any) -> ForwardInput:
    """Every row is a sequence of its own with one token, in the null page."""
    zeros = torch.zeros(rows, dtype=torch.int64)
    attn = AttnPlan(rows, zeros.int() + 1, zeros.int()[:, None], (1,) * rows, (0,) * rows)
    return replace(ForwardInput(zeros, zeros, zeros, attn, zeros[:0]), **fields)


def layer(path: Path, dims: ParallelDims) -> tuple[ExpertLayer, ModelConfig]:
    config = ModelConfig.load(path)
    ckpt = Checkpoint(path, config, CPU, torch.float32)
    return ExpertLayer(ckpt, config, dims, ExpertPlacement.contiguous(4, EXPERTS, dims.ep_size), LAYER), config


@pytest.mark.parametrize("real", [0, 2, 5])
def test_rows_behind_the_real_ones_choose_no_expert(
    real: int, random_bf16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts, config = layer(random_bf16, ParallelDims())
    chosen: list[Tensor] = []
    begin = LocalExperts.begin
    monkeypatch.setattr(LocalExperts, "begin", lambda *args: (chosen.append(args[3]), begin(*args))[1])
    moe = Moe(experts.ckpt, config, ParallelDims(), lambda _: LocalExperts(experts), LAYER)
    h = Operand(torch.randn(5, config.hidden_size, generator=torch.Generator().manual_seed(0)), None)
    moe(h, step(5, num_tokens=torch.tensor([real], dtype=torch.int32)))
    assert (chosen[0][real:] == -1).all() and (chosen[0][:real] >= 0).all()


def test_rows_that_make_replicas_equally_long_choose_no_expert(
    random_bf16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mirrored(ParallelDims):
        """The other replica has the same rows."""

        def dp_all_gather(self, x: Tensor) -> Tensor:
            return torch.stack((x, x))

        def dp_reduce_scatter(self, x: Tensor) -> Tensor:
            return x[0]

    dims = Mirrored(dp=2)
    experts, config = layer(random_bf16, dims)
    gather, chosen = GatherExperts(experts), list[Tensor]()
    compute = gather._experts
    monkeypatch.setattr(gather, "_experts", lambda *args: (chosen.append(args[2]), compute(*args))[1])
    h = Operand(torch.randn(2, config.hidden_size, generator=torch.Generator().manual_seed(0)), None)
    shape = (2, config.num_experts_per_tok)
    begun = gather.begin(h, torch.ones(shape), torch.zeros(shape, dtype=torch.int32), step(2, dp_num_tokens=(2, 5)))
    assert begun().shape == (2, config.hidden_size)
    ids = chosen[0].unflatten(0, (2, 5))
    assert (ids[:, 2:] == -1).all() and (ids[:, :2] == 0).all()


def test_step_of_the_model_has_counters_and_one_product_per_attention(
    random_bf16: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = ModelConfig.load(random_bf16).without_mtp()
    ckpt = Checkpoint(random_bf16, config, CPU, torch.float32)
    ckpt.skip(f"model.layers.{config.num_hidden_layers}.")
    model = DeepseekV3(ckpt, config, ParallelDims())
    inside: list[object] = []
    of_h: list[tuple[int, ...]] = []
    linear = mla.linear

    def noted(x: Any, weight: Any) -> Tensor:
        if isinstance(x, Operand) and x.plain is not None and x.plain.shape[1] == config.hidden_size:
            inside.append(getattr(scratch._active, "scratch", None))
            of_h.append(tuple(weight.shape))
        return linear(x, weight)

    monkeypatch.setattr(mla, "linear", noted)
    kv = torch.zeros(2, config.num_kv_layers, 64, config.kv_row_dim)
    model.forward(step(3), kv)
    assert len(of_h) == config.num_hidden_layers and {shape[1] for shape in of_h} == {config.hidden_size}
    assert all(one is model.scratch for one in inside), "the counters of all layers are zeroed at once"
    assert getattr(scratch._active, "scratch", None) is None
