"""What fits on a GPU: the memory plan of a start with its estimates, and the sequences that its pages hold."""

from __future__ import annotations

import torch

from millrace_serve.engine.config import GIB
from millrace_serve.engine.start.memory import Memory, MemoryPlan
from millrace_serve.engine.start.startup import RankSetup, estimated, kv_layout, planned
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.plan.settings import PlannedConfig, Setup

LENGTHS = (1024, 4096, 32768)


def memory(setup: Setup, config: PlannedConfig, gib: float) -> MemoryPlan:
    """Of each rank. `config`: a worker's. `gib`: of the GPU. Raises OverCommitted."""
    model = setup.model if config.limits.draft_tokens else setup.model.without_mtp()
    layout = kv_layout(config.limits, config, model, "", torch.bfloat16)
    dims = ParallelDims(
        tp=setup.tp,
        dp=setup.dp,
        expert_tp=config.expert_tp,
        dense_tp=config.dense_tp,
        redundant_experts=config.redundant_experts,
    )
    rank_setup = RankSetup(setup.role, config.limits, config, model, layout, dims, torch.device("cuda"), torch.bfloat16)
    return planned(rank_setup, Memory(int(gib * GIB), int(gib * GIB)), estimated(rank_setup))


def text(plan: MemoryPlan) -> str:
    """The table of memory, and the sequences of each replica by length."""
    pages = plan.num_pages - 1
    held = (f"{pages // -(-length // plan.page_tokens):,} of {length:,} tokens" for length in LENGTHS)
    return f"{plan.table()}\nsequences at once: {', '.join(held)}"
