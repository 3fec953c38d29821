"""`millrace plan`: what a worker would choose on a kind of GPU, what fits, and how long its steps would take; and which
split of workers into prefill and decode serves a workload best.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from millrace_common import config as configuration
from millrace_common.split import Capacity
from millrace_serve.engine.config import Role
from millrace_serve.engine.start import layouts
from millrace_serve.engine.start.memory import MemoryPlan
from millrace_serve.model.config import ModelConfig, ModelConfigError
from millrace_serve.plan import report, splits
from millrace_serve.plan.facts import EXPERTS
from millrace_serve.plan.settings import NODE, Goal, Setting, Setup, decide, setup_of
from millrace_serve.worker.config import WorkerConfig

from millrace_cli.check import GPUS
from millrace_cli.errors import CommandError, told

HANDOVER_S = 0.01  # between the first token and the second, when another worker goes on


def plan(model: Path, gpu: str, ranks: tuple[int, int], role: Role, goal: Goal, overrides: Sequence[str]) -> None:
    """Print the plan of a worker of tp x dp `ranks`. Raises CommandError when it does not fit or `gpu` is unknown."""
    setup, config, choices = _chosen(model, gpu, ranks, role, goal, overrides)
    (tp, dp), kind = ranks, setup.gpu
    print(f"{model.resolve().name}: a {role} worker on {tp * dp} x {kind}, tp={tp}, dp={dp}, goal {goal}\n")
    print(f"{report.settings(config, choices)}\n")
    print(f"each rank, estimated before a start measures it:\n{layouts.memory_text(_memory(setup, config))}\n")
    print(report.steps(setup, config))


def workload(
    model: Path,
    gpu: str,
    gpus: int,
    ranks: tuple[int | None, int | None],
    asked: str,
    slo: str,
    overrides: Sequence[str],
) -> None:
    """Print what each split of `gpus` into workers of tp x dp is expected to serve. Raises CommandError."""
    with told(ValueError, of="--workload"):
        load = splits.workload(asked)
    with told(ValueError, of="--slo"):
        limits = splits.limits(slo)
    with told(ModelConfigError, code=1):  # by default a rank has as many experts as a timed one
        tp, dp = ranks[0] or 1, ranks[1] or max(ModelConfig.load(model).n_routed_experts // EXPERTS, 1)
    workers, rest = divmod(gpus, tp * dp)
    if rest or workers < 2:
        raise CommandError(f"--gpus {gpus}: must be two or more workers of tp {tp} x dp {dp}", code=2)
    setup, config, _ = _chosen(model, gpu, (tp, dp), Role.FLEXIBLE, Goal.BALANCED, overrides)
    times = splits.times(report.ranks_of(setup, config))
    if times is None:
        raise CommandError(f"--gpu {setup.gpu}: this model's steps were not timed there; choose another")
    memory = _memory(setup, config)
    tokens = (memory.num_pages - 1) * memory.page_tokens
    capacity = Capacity(config.limits.max_running, tokens, config.limits.max_prefill_tokens, HANDOVER_S)
    print(f"{model.resolve().name}: {workers} workers of {tp * dp} x {setup.gpu}, {asked} requests/s, {slo}\n")
    print(splits.table(workers, dp, load, limits, times, capacity))


def _chosen(
    model: Path, gpu: str, ranks: tuple[int, int], role: Role, goal: Goal, overrides: Sequence[str]
) -> tuple[Setup, WorkerConfig, Sequence[Setting]]:
    kind = gpu.upper()
    if kind not in GPUS:
        raise CommandError(f"--gpu: must be one of {', '.join(GPUS)}, not {gpu!r}", code=2)
    tp, dp = ranks
    own = [f"role={role}", f"goal={goal}", "device=cuda", f"model={model}", f"tp={tp}", f"dp={dp}", *overrides]
    values: dict[str, object] = {"dtype": "bfloat16"}
    with told(ModelConfigError, code=1), told(configuration.ConfigError):
        ModelConfig.load(model)
        for item in own:
            configuration.override(values, item)
        setup = setup_of(values, kind)
        choices = decide(setup) if setup else ()
        chosen = [f"{choice.key}={json.dumps(choice.value)}" for choice in choices]
        config = configuration.load(WorkerConfig, None, [*own[:6], *chosen, *overrides])
    assert setup is not None, "the configuration was valid"
    return setup, config, choices


def _memory(setup: Setup, config: WorkerConfig) -> MemoryPlan:
    with told(configuration.OverCommitted, ValueError, code=1):
        return layouts.memory_plan(setup, config, GPUS[setup.gpu])


def split(gpus: int, goal: Goal, tp: int | None, dp: int | None) -> tuple[int, int]:
    """tp and dp of so many GPUs; where none is given, tensors of a host for latency and replicas of one GPU otherwise.
    Raises CommandError.
    """
    if tp is None:
        tp = gpus // dp if dp else min(gpus, NODE) if goal is Goal.LATENCY else 1
    dp = dp or gpus // max(tp, 1)
    if tp * dp != gpus:
        raise CommandError(f"--gpus {gpus}: must be tp {tp} x dp {dp}", code=2)
    return tp, dp
