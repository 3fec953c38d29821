"""Puts a rank together from a checkpoint."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import torch

from millrace_serve.engine.cache.kv_pool import KvLayout, KvPool
from millrace_serve.engine.config import EngineConfig, Execution, Limits, Role
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.grammar.grammars import Grammars
from millrace_serve.engine.grammar.xgrammar_compiler import XgrammarCompiler
from millrace_serve.engine.schedule.factory import make_scheduler
from millrace_serve.engine.schedule.limits import ModelFacts
from millrace_serve.engine.start import compile_ahead
from millrace_serve.engine.start.phases import Phases
from millrace_serve.engine.start.startup import MemoryPlanner, Site, prepare
from millrace_serve.engine.step.batch import BatchBuilder
from millrace_serve.engine.step.device import device_of
from millrace_serve.engine.step.groups import lockstep_of
from millrace_serve.engine.step.lockstep import Lockstep
from millrace_serve.engine.step.torch_runner import TorchRunner
from millrace_serve.model.checkpoint.checkpoint_hash import checkpoint_hash
from millrace_serve.model.checkpoint.random_weights import RandomWeights
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.parallel import ParallelDims


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank of a worker, ready for steps: the leader of a replica (tp_rank 0) has an engine, the others follow."""

    role: Role
    path: Path
    config: EngineConfig
    model: ModelConfig
    pool: KvPool
    runner: TorchRunner
    lockstep: Lockstep

    def engine(self) -> Engine:
        facts = ModelFacts(self.model.vocab_size, frozenset(self.model.eos_token_ids))
        grammars = Grammars(XgrammarCompiler(self.path, facts.vocab_size, facts.eos_token_ids), time.monotonic)
        scheduler = make_scheduler(self.config, self.role, facts, time.monotonic, grammars)
        builder = BatchBuilder(self.config)
        return Engine(self.config, scheduler, grammars, builder, self.runner, self.pool, self.lockstep)

    def follow(self) -> None:
        """Run what the leader of this replica shares, until its engine is closed."""
        self.lockstep.follow(self.runner)
        self.runner.close()


def load_rank(
    limits: Limits,
    role: Role,
    path: Path,
    dims: ParallelDims,
    device: torch.device,
    dtype: torch.dtype,
    execution: Execution | None = None,
    phases: Phases | None = None,
    model: DeepseekV3 | None = None,
) -> Rank:
    """Collective over all ranks of `dims`.

    Args:
        model: one that is there already, in the place of what `path` holds.
    Raises:
        ConfigError, CheckpointError: the checkpoint cannot be used.
        ValueError: max_model_len is more than the model's, the model does not divide by `dims`, or draft_tokens asks
            for an MTP layer that the checkpoint does not have.
        OverCommitted: there is too little memory.
    """
    execution, phases = execution or Execution(), phases or Phases()
    device = device_of(device).torch  # other processes must be told which one it is
    model_config = _model_config(limits, path) if model is None else model.config
    if limits.max_model_len > model_config.max_position_embeddings:
        raise ValueError(
            f"max_model_len={limits.max_model_len} is more than the model's {model_config.max_position_embeddings}"
        )
    read = model is None and not execution.random_weights
    if read and execution.simulated_acceptance:
        raise ValueError("simulated_acceptance needs random_weights=true: the outputs of real weights would be wrong")
    layout = _layout(limits, execution, model_config, checkpoint_hash(path) if read else "random", dtype)
    site = Site(role, limits, execution, model_config, layout, dims, device, dtype)
    planner = MemoryPlanner(site)
    lockstep = lockstep_of(dims)
    if model is None:
        with phases("load"):
            with compile_ahead.beside(site, compile_ahead.parts(site, planner.check())):
                model = _model(site, path)
            compile_ahead.together(site)
    with phases("memory"):
        config = limits.resolved(planner.pages(model))
        pool = KvPool.create(layout, config.num_pages, device)
        if config.poison:
            pool.scrub(range(1, config.num_pages))
    simulated = execution.simulated_acceptance
    runner = TorchRunner(model, pool, config, model_config.vocab_size, device_of(device), simulated)
    prepare(site, config, runner, phases)
    compile_ahead.mark(site)
    return Rank(role, path, config, model_config, pool, runner, lockstep)


def _model_config(limits: Limits, path: Path) -> ModelConfig:
    """The configuration of the layers that this worker loads."""
    config = ModelConfig.load(path)
    if not limits.draft_tokens:
        return config.without_mtp()
    if not config.num_nextn_predict_layers:
        raise ValueError(f"draft_tokens={limits.draft_tokens}: {path} has no MTP layer (num_nextn_predict_layers)")
    return config


def _model(site: Site, path: Path) -> DeepseekV3:
    if not site.execution.random_weights:
        mtp = site.model.num_nextn_predict_layers > 0
        return load_model(path, site.dims, site.device, site.dtype, mtp=mtp)
    weights = RandomWeights(site.device, site.dtype, fp8=site.fp8)
    return DeepseekV3(weights, site.model, site.dims)


def _layout(limits: Limits, execution: Execution, model: ModelConfig, model_hash: str, dtype: torch.dtype) -> KvLayout:
    own = str(dtype).removeprefix("torch.")
    return KvLayout(
        page_size=limits.page_size,
        num_layers=model.num_kv_layers,
        dtype=own if execution.kv_dtype == "auto" else execution.kv_dtype,
        latent_width=model.kv_lora_rank,
        rope_width=model.qk_rope_head_dim,
        canary=limits.canary,
        model_hash=model_hash,
    )
