"""What a rank of a real model is made of. Imports torch."""

from __future__ import annotations

import torch

from millrace_serve.engine.engine import Engine
from millrace_serve.engine.lockstep import follow
from millrace_serve.engine.torch_factory import build_engine, load_rank
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.parallel import init_parallel, leave_parallel
from millrace_serve.worker.rank import Parts, RankSpec


def build(spec: RankSpec) -> Parts:
    """Collective over all ranks of the worker."""
    config = spec.config
    assert config.model is not None
    device = torch.device(config.device)
    if device.type == "cuda":
        device = torch.device("cuda", spec.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dims = init_parallel(spec.rank, config.tp, config.dp, spec.rendezvous, device)
    dtype = getattr(torch, config.dtype)
    model = ModelConfig.load(config.model)
    facts = model.vocab_size, config.limits.max_model_len, sorted(model.eos_token_ids)
    if dims.tp_rank == 0:
        engine: Engine = build_engine(config.limits, config.role, config.model, dims, device, dtype)
        return Parts(engine.pool, *facts, engine=engine, leave=leave_parallel)
    rank = load_rank(config.limits, config.model, dims, device, dtype)
    broadcast = rank.control.broadcast
    assert broadcast is not None

    def run() -> None:
        follow(rank.runner, broadcast)
        rank.runner.close()

    return Parts(rank.pool, *facts, run=run, leave=leave_parallel)
