"""What fits on kinds of GPU, before any is there, by the estimates of engine/start/memory.py."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from millrace_common.config import OverCommitted

from millrace_serve.engine.config import GIB, Execution, Limits, Role
from millrace_serve.engine.start.exchange import expected_bytes
from millrace_serve.engine.start.memory import Demand, Memory, MemoryPlan
from millrace_serve.engine.start.startup import RankSetup, estimated, kv_layout, planned
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.plan.settings import NODE, PlannedConfig, Setup

CUDA = torch.device("cuda")
LENGTHS = (1024, 4096, 32768)
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
            demand = estimated(setup, expected_bytes(setup))
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


def memory_plan(setup: Setup, config: PlannedConfig, gib: float) -> MemoryPlan:
    """Of each rank. `config`: a worker's. `gib`: of the GPU. Raises OverCommitted, ModelConfigError."""
    model = config.limits.layers_of(setup.model)
    layout = kv_layout(config.limits, config, model, "", torch.bfloat16)
    dims = ParallelDims(
        tp=setup.tp,
        dp=setup.dp,
        expert_tp=config.expert_tp,
        dense_tp=config.dense_tp,
        redundant_experts=config.redundant_experts,
    )
    rank = RankSetup(setup.role, config.limits, config, model, layout, dims, CUDA, torch.bfloat16)
    return planned(rank, Memory(int(gib * GIB), int(gib * GIB)), estimated(rank, expected_bytes(rank)))


def memory_text(plan: MemoryPlan) -> str:
    """The table of memory, and the sequences of each replica by length."""
    pages = plan.num_pages - 1
    held = (f"{pages // -(-length // plan.page_tokens):,} of {length:,} tokens" for length in LENGTHS)
    return f"{plan.table()}\nsequences at once: {', '.join(held)}"
