"""Puts a real engine together from a checkpoint. A replica's leader gets an Engine; its other ranks follow."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from millrace_serve.engine.batch import BatchBuilder
from millrace_serve.engine.config import EngineConfig, Role
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.factory import Clock, make_scheduler
from millrace_serve.engine.grammar import Grammars
from millrace_serve.engine.groups import ControlGroups
from millrace_serve.engine.kv_pool import KvLayout, KvPool
from millrace_serve.engine.limits import ModelFacts
from millrace_serve.engine.lockstep import Together, follow
from millrace_serve.engine.torch_runner import TorchRunner
from millrace_serve.engine.xgrammar_compiler import XgrammarCompiler
from millrace_serve.model.checkpoint_hash import checkpoint_hash
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import load_model
from millrace_serve.model.parallel import ParallelDims


@dataclass(frozen=True, slots=True)
class Rank:
    """What every rank of a worker has, leader or not."""

    config: EngineConfig
    model: ModelConfig
    pool: KvPool
    runner: TorchRunner
    control: ControlGroups


def build_engine(
    config: EngineConfig,
    role: Role,
    model_path: str | Path,
    dims: ParallelDims,
    device: torch.device,
    dtype: torch.dtype,
    clock: Clock = time.monotonic,
) -> Engine:
    """The engine of a leader (tp_rank 0). Collective: the other ranks of its group call `run_follower` meanwhile.

    Raises:
        ConfigError, CheckpointError: the checkpoint cannot be used.
        ValueError: max_model_len is more than the model's, or the model does not divide by `dims`.
    """
    rank = load_rank(config, Path(model_path), dims, device, dtype)
    facts = ModelFacts(rank.model.vocab_size, frozenset(rank.model.eos_token_ids))
    grammars = Grammars(XgrammarCompiler(Path(model_path), facts.vocab_size, facts.eos_token_ids), clock)
    scheduler = make_scheduler(config, role, facts, clock, grammars)
    lockstep = Together(rank.control.all_gather, rank.control.broadcast)
    return Engine(config, scheduler, BatchBuilder(config), rank.runner, rank.pool, lockstep)


def run_follower(
    config: EngineConfig, model_path: str | Path, dims: ParallelDims, device: torch.device, dtype: torch.dtype
) -> None:
    """Run what the leader of this replica broadcasts, until its engine is closed."""
    rank = load_rank(config, Path(model_path), dims, device, dtype)
    assert rank.control.broadcast is not None, "tp == 1 has no followers"
    follow(rank.runner, rank.control.broadcast)
    rank.runner.close()


def load_rank(config: EngineConfig, path: Path, dims: ParallelDims, device: torch.device, dtype: torch.dtype) -> Rank:
    model_config = ModelConfig.load(path)
    if config.max_model_len > model_config.max_position_embeddings:
        raise ValueError(
            f"max_model_len={config.max_model_len} is more than the model's {model_config.max_position_embeddings}"
        )
    control = ControlGroups.create(dims)
    model = load_model(path, dims, device, dtype)
    layout = KvLayout(
        page_size=config.page_size,
        num_layers=model_config.num_kv_layers,
        dtype=str(dtype).removeprefix("torch."),
        latent_width=model_config.kv_lora_rank,
        rope_width=model_config.qk_rope_head_dim,
        canary=config.canary,
        model_hash=checkpoint_hash(path),
    )
    pool = KvPool.create(layout, config.num_pages, device)
    if config.poison:
        pool.scrub(range(1, config.num_pages))
    runner = TorchRunner(model, pool, config.max_running, model_config.vocab_size, device)
    return Rank(config, model_config, pool, runner, control)
