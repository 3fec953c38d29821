"""Puts a rank together from a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from millrace_common.step_times import StepTimes
from millrace_common.tokenizer_file import HUGGING_FACE, TIKTOKEN, load_tokenizer
from millrace_kernels import backend

from millrace_serve.engine.cache.kv_pool import KvPool
from millrace_serve.engine.config import EngineConfig, Execution, Limits, Role
from millrace_serve.engine.engine import Engine
from millrace_serve.engine.grammar.grammars import Grammars
from millrace_serve.engine.grammar.llguidance_compiler import LlguidanceCompiler
from millrace_serve.engine.lockstep.join import join, own_host
from millrace_serve.engine.lockstep.lockstep import Lockstep
from millrace_serve.engine.offload.cuda_copier import make_copier
from millrace_serve.engine.offload.page_copier import PageCopier
from millrace_serve.engine.schedule.factory import UNKNOWN, make_scheduler
from millrace_serve.engine.schedule.limits import ModelFacts
from millrace_serve.engine.start import compile_ahead, finite
from millrace_serve.engine.start.compilations import Compilations
from millrace_serve.engine.start.compile import announce_kernels
from millrace_serve.engine.start.exchange import ExpertExchange, make_exchange
from millrace_serve.engine.start.memory import MemoryPlan, host_memory
from millrace_serve.engine.start.phases import Phases
from millrace_serve.engine.start.reload import load
from millrace_serve.engine.start.startup import MemoryPlanner, RankSetup, kv_layout, prepare
from millrace_serve.engine.step.batch import BatchBuilder
from millrace_serve.engine.step.device import device_of
from millrace_serve.engine.step.torch_runner import TorchRunner
from millrace_serve.model.checkpoint.checkpoint_hash import checkpoint_hash
from millrace_serve.model.config import ModelConfig
from millrace_serve.model.deepseek_v3 import DeepseekV3, load_model
from millrace_serve.model.experts.routed import Implementation
from millrace_serve.model.parallel import ParallelDims
from millrace_serve.model.reduce import Fused, fused_reduce


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
    copier: PageCopier
    load: Callable[[Path, bool], str] | None = None  # a checkpoint over the weights, or only check it; its hash
    memory: Sequence[MemoryPlan] = ()  # of its device: estimated before the weights were read, then measured

    def engine(self, times: StepTimes = UNKNOWN) -> Engine:
        """`times` of its steps, until it has measured them."""
        facts = ModelFacts(self.model.vocab_size, frozenset(self.model.eos_token_ids))
        grammars = Grammars(LlguidanceCompiler(self.path, facts.vocab_size, facts.eos_token_ids), time.monotonic)
        scheduler = make_scheduler(self.config, self.role, facts, time.monotonic, grammars, times)
        builder = BatchBuilder(self.config)
        return Engine(self.config, scheduler, grammars, builder, self.runner, self.pool, self.lockstep, self.copier)

    def follow(self) -> None:
        """Run what the leader of this replica shares, until its engine is closed."""
        self.lockstep.follow(self.runner, lambda copies: self.copier.follow(*copies.moves))
        self.runner.close()
        self.copier.close()


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
    address: str = "127.0.0.1",
) -> Rank:
    """Collective over all ranks of `dims`.

    Args:
        model: one that is there already, in the place of what `path` holds.
        address: at which ranks of other hosts reach this one.
    Raises:
        ModelConfigError, CheckpointError: the checkpoint cannot be used. OverCommitted: there is too little memory.
        ValueError: a setting, which it names, asks for what the model, the ranks or the device cannot give.
    """
    execution, phases = execution or Execution(), phases or Phases()
    dims = replace(dims, dense_tp=execution.dense_tp, redundant_experts=execution.redundant_experts)
    device = device_of(device).torch  # other processes must be told which one it is
    backend.prefer(execution.libraries, device)
    model_config = _model_config(limits, path) if model is None else model.config
    if limits.max_model_len > (most := model_config.max_position_embeddings):
        raise ValueError(f"max_model_len={limits.max_model_len} is more than the model's {most}")
    read = model is None and not execution.random_weights
    layout = kv_layout(limits, execution, model_config, checkpoint_hash(path) if read else "random", dtype)
    setup = RankSetup(role, limits, execution, model_config, layout, dims, device, dtype)
    planner = MemoryPlanner(setup)
    if limits.host_cache_gib:  # collective, before any rank takes memory
        hosts = [host.decode() for host in dims.exchange(own_host().encode())]
        limits.check_host_memory(dims.tp, hosts, hosts[dims.rank], host_memory())
    lockstep = Lockstep() if dims.world == 1 else join(dims.rank, dims.tp, dims.dp, dims.exchange, address)
    compilations = _watch_compilers(setup, lockstep)
    exchange = None
    if model is None:
        with phases("load"):
            model, exchange = _load(setup, path, planner)
    if model.balancer is not None:
        model.balancer.connect()
    with phases("memory"):
        config = limits.resolved(planner.pages(model))
        pool = KvPool.create(layout, config.num_pages, device)
        if poison := "poison" in config.checks:
            pool.scrub(range(1, config.num_pages))
        copier = make_copier(pool, config.host_pages(layout.page_bytes), dims.rank, dims.tp, dims.exchange, poison)
    more = execution.simulated_acceptance, lockstep.progress.busy
    runner = TorchRunner(model, pool, config, model_config.vocab_size, device_of(device), *more)
    _watch(runner, exchange, model.reduce.fused)
    with phases("memory"):
        finite.check(setup, runner, model)
    prepare(setup, config, runner, phases)
    runner.balance()
    compile_ahead.mark(setup)
    compilations.start_is_over()
    parts = role, path, config, model_config, pool, runner, lockstep, copier, partial(load, setup, model, runner)
    return Rank(*parts, planner.plans)


def _watch_compilers(setup: RankSetup, lockstep: Lockstep) -> Compilations:
    """Whoever watches this rank learns of each compilation, while it runs and how many there were."""
    folder = setup.execution.cache_dir
    own = Path.home() / ".deep_gemm" if folder is None else folder.expanduser() / "deep_gemm"
    compilations = Compilations(own / "cache")
    if setup.device.type == "cuda":
        announce_kernels(lockstep.progress.busy)
        compilations.subscribe()
        lockstep.progress.compiled = compilations.counts
    return compilations


def _model_config(limits: Limits, path: Path) -> ModelConfig:
    """The configuration of the layers that this worker loads; also reads the tokenizer, which grammars need later."""
    config = limits.layers_of(ModelConfig.load(path), path)
    if any((path / name).exists() for name in (HUGGING_FACE, TIKTOKEN)):
        load_tokenizer(path)
    return config


def _load(setup: RankSetup, path: Path, planner: MemoryPlanner) -> tuple[DeepseekV3, ExpertExchange]:
    exchange = make_exchange(setup)
    sums = fused_reduce(setup.dims, setup.most_rows, setup.model.hidden_size, setup.device, setup.dtype)
    planner.outside_torch = exchange.nbytes + (0 if sums is None else sums.nbytes)
    with compile_ahead.beside(setup, compile_ahead.parts(setup, planner.check())):
        model = _model(setup, path, exchange.experts)
        model.reduce.fused = sums
    compile_ahead.together(setup)
    return model, exchange


def _watch(runner: TorchRunner, exchange: ExpertExchange | None, sums: Fused | None) -> None:
    """The runner notices ranks that do not answer."""
    if exchange is not None and exchange.error is not None:
        runner.watch("the exchange of experts", exchange.error)
    if sums is not None:
        runner.watch("a sum over tp", sums.error)


def _model(setup: RankSetup, path: Path, experts: Implementation) -> DeepseekV3:
    if not setup.execution.random_weights:
        if setup.execution.simulated_acceptance:
            raise ValueError("simulated_acceptance needs random_weights=true: outputs of real weights would be wrong")
        mtp = setup.model.num_nextn_predict_layers > 0
        return load_model(path, setup.dims, setup.device, setup.dtype, setup.thresholds, mtp=mtp, experts=experts)
    return DeepseekV3(setup.random_weights(), setup.model, setup.dims, setup.thresholds, experts)
