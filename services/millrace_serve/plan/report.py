"""The plan as text: what is chosen and why, and the predicted times of steps. A worker's start logs it, and `millrace
plan` prints it beside what fits.
"""

from collections.abc import Sequence
from operator import attrgetter

from millrace_serve.plan import predict
from millrace_serve.plan.facts import shape_of
from millrace_serve.plan.predict import Prediction, StepRanks
from millrace_serve.plan.settings import FP8_KV, PlannedConfig, Setting, Setup

ROWS, CONTEXTS = (1, 8, 32, 64, 128, 256), (1024, 2048, 4096, 8192)
NO_RUN = "no run to predict from"


def settings(config: PlannedConfig, choices: Sequence[Setting]) -> str:
    """A line of each setting of a worker's configuration. A value that differs from the plan's was set."""
    lines = []
    for choice in choices:
        value = attrgetter(choice.key)(config)
        why = choice.why if value == choice.value else f"set; the plan has {_text(choice.value)}"
        lines.append(f"{choice.key:<30} {_text(value):<15} {why}")
    return "\n".join(lines)


def steps(setup: Setup, config: PlannedConfig) -> str:
    """Predicted milliseconds of decode steps, and of a prompt token, with the files that they come from."""
    ranks = ranks_of(setup, config)
    table = {rows: [predict.decode(ranks, rows, context) for context in CONTEXTS] for rows in ROWS}
    table = {rows: line for rows, line in table.items() if rows <= config.limits.max_running and any(line)}
    lines = ["decode, ms; sequences by context" + "".join(f"{context:>9}" for context in CONTEXTS)] if table else []
    lines += [f"{rows:>32}" + "".join(f"{_ms(one):>9}" for one in line) for rows, line in table.items()]
    prompts = {length: found for length in CONTEXTS if (found := predict.prefill(ranks, length))}
    lines += [
        f"prompts of {length} tokens: {1e3 / one.ms:,.0f} tokens/s of a replica" for length, one in prompts.items()
    ]
    made = [one for line in table.values() for one in line if one] + list(prompts.values())
    return "\n".join([*lines, *_sources(made)]) if made else f"steps: {NO_RUN} ({setup.gpu or 'unknown GPU'})"


def ranks_of(setup: Setup, config: PlannedConfig) -> StepRanks:
    shape = shape_of(setup.model, setup.tp, setup.dp, expert_tp=config.expert_tp)
    return StepRanks(setup.gpu, shape, setup.tp * setup.dp, setup.model.num_hidden_layers, config.kv_dtype == FP8_KV)


def _sources(found: Sequence[Prediction]) -> list[str]:
    files = sorted({file for one in found for file in one.files})
    scaled = sorted({how for one in found for how in one.scaled})
    return [f"from {', '.join(files)}", *([f"scaled: {', '.join(scaled)}"] if scaled else [])]


def _ms(found: Prediction | None) -> str:
    return f"{found.ms:.1f}" if found else "-"


def _text(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return str(list(value)) if isinstance(value, tuple) else str(value)
