"""`millrace check`: whether a checkpoint can be served, on which GPUs, and with how much KV. No weight is read."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import yaml
from millrace_common import config as configuration
from millrace_common.json_values import JsonObject
from millrace_router.text.tokenizer import Tokenizer
from millrace_serve.engine.config import GIB
from millrace_serve.engine.start.layouts import SHAPES, Layout, choose, layouts
from millrace_serve.model.checkpoint.shapes import check_headers
from millrace_serve.model.config import ModelConfig, ModelConfigError
from millrace_serve.model.weights import CheckpointError
from millrace_serve.plan.settings import NODE
from millrace_serve.worker.config import WorkerConfig
from rich.console import Console
from rich.table import Table

from millrace_cli.errors import CommandError, told

GPUS: dict[str, float] = {  # GiB of each kind
    name: gpu["gib"] for name, gpu in yaml.safe_load(Path(__file__).with_name("gpus.yaml").read_text()).items()
}


def check(path: Path, gpu: str, overrides: Sequence[str]) -> None:
    """Prints what was found on standard error, and a values file for Helm on standard output. Raises CommandError when
    the checkpoint cannot be served, or nobody knows `gpu`.
    """
    if gpu not in GPUS:
        raise CommandError(f"--gpu: must be one of {', '.join(GPUS)}, not {gpu!r}", code=2)
    with told(ModelConfigError, CheckpointError, code=1), told(configuration.ConfigError):
        config = configuration.load(
            WorkerConfig, None, ["role=unified", "device=cuda", "limits.num_pages=auto", f"model={path}", *overrides]
        )
        model = config.limits.layers_of(ModelConfig.load(path), path)
        if not config.random_weights:
            check_headers(path, mtp=model.num_nextn_predict_layers > 0)
        tokenizer = Tokenizer.load(path)
    others = [item for item in overrides if item.partition("=")[0].strip() not in ("tp", "dp")]
    shapes = SHAPES if len(others) == len(overrides) else ((config.tp, config.dp),)
    found = list(layouts(config.limits, config, model, GPUS, shapes))
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(_facts(model, tokenizer))
    console.print(_table(found))
    best = choose(found, gpu)
    if best is None:
        why = next((layout.why for layout in reversed(found) if layout.gpu == gpu), "the ranks do not divide the model")
        tried = ", ".join(f"{tp} x {dp}" for tp, dp in shapes)
        raise CommandError(f"the model does not fit on {gpu} GPUs with tp x dp = {tried}: {why}")
    print(values(path, model, best, others))


def values(path: Path, model: ModelConfig, layout: Layout, overrides: Sequence[str]) -> str:
    """A prefill and a decode worker of this layout, for `helm install -f`."""
    name, gpus = path.resolve().name, min(layout.num_gpus, NODE)
    settings: JsonObject = {"timeouts": {"start": 3000, "warmup": 300}}
    for item in overrides:
        configuration.override(settings, item)
    worker: JsonObject = {"gpus": gpus, "gpuModel": layout.gpu, "tp": layout.tp, "dp": layout.dp}
    if layout.num_gpus > NODE:
        worker |= {"kind": "lws", "size": layout.num_gpus // NODE}
    worker["resources"] = {  # as in the presets, for each GPU
        "requests": {"cpu": str(4 * gpus), "memory": f"{32 * gpus}Gi", "ephemeral-storage": "4Gi"},
        "limits": {"memory": f"{64 * gpus}Gi", "ephemeral-storage": "32Gi"},
    }
    document: dict[str, JsonObject] = {
        "model": {"name": name.lower(), "source": "pvc", "claim": "models", "path": name},
        "fabric": {"preset": "ib"},
        "workerDefaults": {**worker, "shm": f"{2 * gpus}Gi", "tmp": f"{2 * gpus}Gi", "config": settings},
        "workers": {"prefill": {}, "decode": {}},
    }
    document["model"]["routedExperts"] = model.n_routed_experts
    head = (
        f"# A prefill and a decode worker on {layout.num_gpus} {layout.gpu} each, made by `millrace check`.\n"
        "# To set: images.registry, the claim `models` that holds the checkpoint, and the fabric between the nodes.\n"
    )
    return f"{head}{yaml.safe_dump(document, sort_keys=False)}"


def _facts(model: ModelConfig, tokenizer: Tokenizer) -> str:
    style, experts = tokenizer.format.style, f"{model.n_routed_experts} experts in {model.n_group} group(s)"
    calls = "no tool calls" if style is None else f"tool calls as {style.name}"
    reasoning = "reasoning" if tokenizer.format.reasons else "no reasoning"
    mtp = "an MTP layer" if model.num_nextn_predict_layers else "no MTP layer in use (limits.draft_tokens)"
    chat = "" if tokenizer.has_template else "; no chat template: chat needs the router's chat_template"
    weights = f"{'FP8' if model.fp8_blocks else 'INT8' if model.int8 else 'BF16'} weights"
    packed = ", its experts in INT4 (FP8 in a GPU's memory)" if model.int4_experts else ""
    return f"{model.num_hidden_layers} layers, {experts}, {weights}{packed}, {mtp}; {calls}, {reasoning}{chat}"


def _table(found: Sequence[Layout]) -> Table:
    title = "Tokens of KV of a replica, estimated; no: does not fit"
    table = Table("GPUs", "tp x dp", "GiB of weights", *GPUS, title=title, box=None)
    for (tp, dp), line in itertools.groupby(found, key=lambda one: (one.tp, one.dp)):
        cells = list(line)
        tokens = (f"{one.tokens:,}" if one.tokens else "no" for one in cells)
        table.add_row(str(tp * dp), f"{tp} x {dp}", f"{cells[0].weights / GIB:.1f}", *tokens)
    return table
