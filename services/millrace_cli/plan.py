"""`millrace plan`: what a worker would choose on a kind of GPU, what fits, and how long its steps would take."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from millrace_common import config as configuration
from millrace_serve.engine.config import Role
from millrace_serve.engine.start.memory import OverCommitted
from millrace_serve.model.config import ModelConfig, ModelConfigError
from millrace_serve.plan import fits, report
from millrace_serve.plan.settings import NODE, Goal, decide
from millrace_serve.worker.config import WorkerConfig, setup_of

from millrace_cli.check import GPUS
from millrace_cli.errors import CommandError


def plan(model: Path, gpu: str, ranks: tuple[int, int], role: Role, goal: Goal, overrides: Sequence[str]) -> None:
    """Print the plan of a worker of tp x dp `ranks`. Raises CommandError when it does not fit or `gpu` is unknown."""
    kind = gpu.upper()
    if kind not in GPUS:
        raise CommandError(f"--gpu: {gpu!r} is none of {', '.join(GPUS)}", code=2)
    tp, dp = ranks
    own = [f"role={role}", f"goal={goal}", "device=cuda", f"model={model}", f"tp={tp}", f"dp={dp}", *overrides]
    values: dict[str, object] = {"dtype": "bfloat16"}
    try:
        ModelConfig.load(model)
        for item in own:
            configuration.override(values, item)
        setup = setup_of(values, kind)
        choices = decide(setup) if setup else ()
        chosen = [f"{choice.key}={json.dumps(choice.value)}" for choice in choices]
        config = configuration.load(WorkerConfig, None, [*own[:6], *chosen, *overrides])
    except (ModelConfigError, configuration.ConfigError) as error:
        raise CommandError(str(error)) from error
    assert setup is not None, "the configuration was valid"
    print(f"{model.resolve().name}: a {role} worker on {tp * dp} x {kind}, tp={tp}, dp={dp}, goal {goal}\n")
    print(f"{report.settings(config, choices)}\n")
    try:
        print(
            f"each rank, estimated before a start measures it:\n{fits.text(fits.memory(setup, config, GPUS[kind]))}\n"
        )
    except (OverCommitted, ValueError) as error:
        raise CommandError(str(error)) from error
    print(report.steps(setup, config))


def split(gpus: int, goal: Goal, tp: int | None, dp: int | None) -> tuple[int, int]:
    """tp and dp of so many GPUs; where none is given, tensors of a host for latency and replicas of one GPU otherwise.
    Raises CommandError.
    """
    if tp is None:
        tp = gpus // dp if dp else min(gpus, NODE) if goal is Goal.LATENCY else 1
    dp = dp or gpus // max(tp, 1)
    if tp * dp != gpus:
        raise CommandError(f"--gpus {gpus}: is not tp {tp} x dp {dp}", code=2)
    return tp, dp
