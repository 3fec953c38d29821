"""The layouts of ranks in which a model fits on kinds of GPU, before any is there: the plan of engine/start/memory.py
with its estimates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from millrace_serve.engine.config import GIB, Execution, Limits, Role
from millrace_serve.engine.start.memory import Demand, Memory, OverCommitted
from millrace_serve.engine.start.startup import RankSetup, estimated, kv_layout, planned
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.parallel import ParallelDims

CUDA = torch.device("cuda")
NODE = 8  # GPUs
# tp and dp: attention in replicas of one GPU, and by tensors, whose sums do not leave a node
SHAPES = tuple(
    dict.fromkeys(one for ranks in (1, 2, 4, 8, 16, 32) for one in ((1, ranks), (ranks, 1)) if one[0] <= NODE)
)


@dataclass(frozen=True, slots=True)
class Layout:
    """A worker of tp x dp ranks on one kind of GPU."""

    gpu: str
    tp: int
    dp: int
    weights: int  # bytes of a rank
    tokens: int  # of KV, of each replica; 0: it does not fit
    why: str = ""  # it does not fit

    @property
    def num_gpus(self) -> int:
        return self.tp * self.dp


def layouts(
    limits: Limits,
    execution: Execution,
    model: ModelConfig,
    gpus: Mapping[str, float],
    shapes: Sequence[tuple[int, int]] = SHAPES,
) -> Iterator[Layout]:
    """Those of `shapes`, tp and dp, that divide the model, on every kind of GPU. `gpus`: GiB of each kind."""
    layout = kv_layout(limits, execution, model, "", torch.bfloat16)
    for tp, dp in shapes:
        setup = RankSetup(
            Role.UNIFIED, limits, execution, model, layout, ParallelDims(tp=tp, dp=dp), CUDA, torch.bfloat16
        )
        try:
            demand = estimated(setup)
        except ValueError:
            continue
        for gpu, gib in gpus.items():
            yield Layout(gpu, tp, dp, demand.weights, *_kv_tokens(setup, demand, int(gib * GIB)))


def _kv_tokens(setup: RankSetup, demand: Demand, total: int) -> tuple[int, str]:
    """Tokens that fit beside the weights, or 0 and the reason. `total`: bytes of a GPU."""
    try:
        plan = planned(setup, Memory(total, total), demand)
    except OverCommitted as error:
        return 0, str(error)
    return (plan.num_pages - 1) * plan.page_tokens, ""


def choose(found: Sequence[Layout], gpu: str) -> Layout | None:
    """The fewest GPUs, then the most KV of all replicas together."""
    fit = [layout for layout in found if layout.gpu == gpu and layout.tokens]
    return min(fit, key=lambda one: (one.num_gpus, -one.dp * one.tokens), default=None)
