"""The values of `auto`: one pure function from model, GPU, ranks, role and goal to settings, each with its reason.

A worker's configuration is filled in from here (worker/config.py), and `millrace plan` prints the same table.
"""

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from millrace_common.json_values import Json, JsonObject

from millrace_serve.engine.config import GIB, Execution, Role
from millrace_serve.engine.drafts.limits import DRAFT_BATCHES, MOST_DRAFTS, best_batches
from millrace_serve.model.config import ModelConfig
from millrace_serve.plan.facts import Gain, gains_of, shape_of

INDEX = "model.safetensors.index.json"
FP8_KV = "float8_e4m3fn"
NODE = 8  # GPUs of a host
BLOCK = 128  # columns that share a scale of FP8 weights
PROMPT_ROWS = 1024  # of each rank of a replica: up to that, launches take longer than the work
RANK_GIB = 16  # of a pod's memory, for a rank besides the host tier
NOT_MEASURED = "not measured"


class Goal(enum.StrEnum):
    THROUGHPUT = "throughput"  # tokens of all requests together
    LATENCY = "latency"  # of each request
    BALANCED = "balanced"


MAX_RUNNING = {Goal.LATENCY: 64, Goal.BALANCED: 192, Goal.THROUGHPUT: 256}
PREFILL_TOKENS = {Goal.LATENCY: 8192, Goal.BALANCED: 8192, Goal.THROUGHPUT: 16384}  # of a worker without decode steps
MIXED_TOKENS = {Goal.LATENCY: 2048, Goal.BALANCED: 2048, Goal.THROUGHPUT: 16384}  # of a unified or flexible one


@dataclass(frozen=True, slots=True)
class Setup:
    """What the settings follow from. drafts: the most that the weights can make; 0: they have no MTP layer."""

    model: ModelConfig
    gpu: str  # a kind of facts.toml; empty: nobody has timed it
    tp: int
    dp: int
    role: Role
    goal: Goal
    drafts: int = MOST_DRAFTS
    bf16: bool = True  # activations
    pod_memory: int = 0  # bytes, for all ranks together; 0: no limit is known

    @property
    def expert_tp(self) -> bool:
        """Whether a rank holds a part of every expert: faster with few sequences, and measured alone with tp=8."""
        unit = self.tp * (BLOCK if self.model.fp8_blocks else 1)
        divides = self.dp == 1 < self.tp and self.model.moe_intermediate_size % unit == 0
        return divides and (self.goal is Goal.LATENCY or self.tp == NODE)

    @property
    def shape(self) -> str:
        return shape_of(self.model, self.tp, self.dp, expert_tp=self.expert_tp)


PlannedConfig = Json  # a worker's configuration, whose module imports this one


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting's value. why: with what was measured, or that nothing was."""

    key: str
    value: Json
    why: str


def decide(setup: Setup) -> tuple[Setting, ...]:
    """Every setting that accepts `auto`, on a GPU."""
    return (
        _kv_dtype(setup),
        Setting("limits.max_running", MAX_RUNNING[setup.goal], f"by goal; {NOT_MEASURED} against others"),
        Setting("graphs", "auto", f"{_gains('graphs', setup)}; the buckets of engine/step/graphs.py"),
        _prompt_graphs(setup),
        _prefill_tokens(setup),
        _context_parallel(setup),
        *_drafts(setup),
        _expert_tp(setup),
        _spare_experts(setup),
        Setting("memory_fraction", Execution.model_fields["memory_fraction"].default, f"more is {NOT_MEASURED}"),
        _host_tier(setup),
    )


AUTO_KEYS = (
    *("kv_dtype", "limits.max_running", "graphs", "chunk_graph_tokens", "limits.max_prefill_tokens"),
    *("limits.context_parallel_tokens", "limits.draft_tokens", "limits.draft_batches", "expert_tp"),
    *("redundant_experts", "memory_fraction", "limits.host_cache_gib"),
)
# No tier is a default: it takes memory that the operator may have meant for something else.
ASKED_KEYS = ("limits.host_cache_gib",)


def prompt_rows(model: ModelConfig, tp: int) -> int:
    """Rows up to which steps with prompt chunks are graphs. Sparse attention has more than a gap could bring along."""
    return 0 if model.index_topk else PROMPT_ROWS * tp


def _kv_dtype(setup: Setup) -> Setting:
    """The same for every role, tp and dp: workers that hand pages over must agree."""
    if setup.goal is not Goal.THROUGHPUT or setup.model.index_topk or not setup.bf16:
        return Setting("kv_dtype", "auto", "that of activations: nothing is lost")
    return Setting("kv_dtype", FP8_KV, f"twice the tokens; a step {_gains('kv_dtype', setup)}; accuracy {NOT_MEASURED}")


def _prompt_graphs(setup: Setup) -> Setting:
    rows = prompt_rows(setup.model, setup.tp)
    why = _gains("chunk_graph_tokens", setup, shape="ep8" if setup.dp > 1 else "tp8")
    return Setting("chunk_graph_tokens", rows, why if rows else "sparse attention has none")


def _prefill_tokens(setup: Setup) -> Setting:
    """A chunk stands between two tokens of a stream where decode steps are."""
    by_role = {Role.PREFILL: PREFILL_TOKENS, Role.UNIFIED: MIXED_TOKENS, Role.FLEXIBLE: MIXED_TOKENS}
    tokens = by_role[setup.role][setup.goal] if setup.role in by_role else MIXED_TOKENS[Goal.BALANCED]
    return Setting("limits.max_prefill_tokens", tokens, f"by role and goal; {NOT_MEASURED} against others")


def _context_parallel(setup: Setup) -> Setting:
    """From the shortest prompt on that was measured, over the replicas of one host."""
    key = "limits.context_parallel_tokens"
    wanted = setup.role is Role.PREFILL and 1 < setup.dp <= NODE and not setup.model.index_topk
    tokens = min(gain.most for gain in gains_of(key, setup.gpu)) if wanted else 0
    return Setting(key, tokens, f"for long prompts, over dp of one host; first token {_gains(key, setup)}")


def _drafts(setup: Setup) -> tuple[Setting, Setting]:
    """Whether there are drafts at all depends on the model alone: workers that hand pages over must agree."""
    if not setup.model.num_nextn_predict_layers or not setup.drafts:
        why = "no MTP layer" if not setup.model.num_nextn_predict_layers else "random weights or no MTP weights"
        return Setting("limits.draft_tokens", 0, why), Setting("limits.draft_batches", DRAFT_BATCHES, why)
    shape = setup.shape or ("tp8" if setup.dp == 1 < setup.tp else "ep8")
    found = gains_of("limits.draft_tokens", setup.gpu, shape)
    batches = best_batches({(gain.level, gain.most): gain.gain for gain in found})[: setup.drafts]
    why = f"tokens/s {_range(found, setup)} with simulated acceptance"
    padded = (*batches, *DRAFT_BATCHES[len(batches) :])
    return Setting("limits.draft_tokens", len(batches), why), Setting("limits.draft_batches", padded, why)


def _expert_tp(setup: Setup) -> Setting:
    if setup.tp == NODE and setup.expert_tp:
        why = f"every figure of tp=8 is of it (h200/shard-tp8.json); whole experts are {NOT_MEASURED}"
    else:
        why = f"for dp=1 and few sequences; tp=2 with 1 to 64: {_gains('expert_tp', setup)}"
    return Setting("expert_tp", setup.expert_tp, why)


def _spare_experts(setup: Setup) -> Setting:
    """Decode steps gained as much with some gates as they lost with others."""
    held = setup.model.n_routed_experts // (setup.tp * setup.dp)
    wanted = (
        setup.role is Role.PREFILL and 1 < setup.dp <= NODE and setup.tp == 1 and held < setup.model.n_routed_experts
    )
    return Setting(
        "redundant_experts", int(wanted), f"for prompts over dp of one host; {_gains('redundant_experts', setup)}"
    )


def _host_tier(setup: Setup) -> Setting:
    """The other half is left to the files of the checkpoint."""
    if not setup.pod_memory:
        return Setting("limits.host_cache_gib", 0.0, "the pod has no memory limit, or none that is known")
    left = setup.pod_memory - RANK_GIB * GIB * setup.tp * setup.dp
    why = f"half of the pod's memory limit less {RANK_GIB} GiB a rank, over dp; {NOT_MEASURED}"
    return Setting("limits.host_cache_gib", float(max(left, 0) // (2 * setup.dp * GIB)), why)


def _gains(setting: str, setup: Setup, shape: str = "") -> str:
    return _range(gains_of(setting, setup.gpu, shape), setup)


def _range(found: Sequence[Gain], setup: Setup) -> str:
    """ "x1.48 to x3.29 (H100, h100/a.json)", of the GPU that was measured."""
    if not found:
        return NOT_MEASURED
    low, high = (f"x{extreme(gain.gain for gain in found):.2f}" for extreme in (min, max))
    files, kinds = sorted({gain.file for gain in found}), sorted({gain.gpu for gain in found})
    where = "" if setup.gpu in kinds else f"on {' and '.join(kinds)} only, "
    return f"{low if low == high else f'{low} to {high}'} ({where}{', '.join(files)})"


def filled(values: Mapping[str, Json], choices: Iterable[Setting]) -> JsonObject:
    """`values` of a configuration with the choices where a key is `auto` or absent; ASKED_KEYS only where they are
    `auto`. A key that is `auto` and has no choice goes: the model's default holds.
    """
    result: JsonObject = {name: dict(part) if isinstance(part, Mapping) else part for name, part in values.items()}
    chosen = {choice.key: choice.value for choice in choices}
    for key in AUTO_KEYS:
        section, _, leaf = key.rpartition(".")
        place = result.setdefault(section, {}) if section else result
        if not isinstance(place, dict) or place.get(leaf, "" if key in ASKED_KEYS else "auto") != "auto":
            continue
        place.pop(leaf, None)
        if key in chosen:
            place[leaf] = chosen[key]
    return result


def setup_of(values: Mapping[str, Json], gpu: str, pod_memory: int = 0) -> Setup | None:
    """What the plan of a configuration's raw values follows from. None: some of them are faulty, or there is no
    config.json that can be read; the validation or the start says so. `pod_memory`: bytes that this pod's limit allows.
    """
    try:
        folder = Path(values["model"])
        model = ModelConfig.load(folder)
        return Setup(
            model=model,
            gpu=gpu,
            tp=max(int(values.get("tp", 1)), 1),
            dp=max(int(values.get("dp", 1)), 1),
            role=Role(values.get("role", Role.DECODE)),
            goal=Goal(values.get("goal", Goal.BALANCED)),
            drafts=most_drafts(values, folder, model),
            bf16=values.get("dtype") == "bfloat16",
            pod_memory=0 if values.get("launcher") == "ray" else pod_memory,  # ranks are in other pods, too
        )
    except (KeyError, TypeError, ValueError, OverflowError, OSError):
        return None


def most_drafts(values: Mapping[str, Json], folder: Path, model: ModelConfig) -> int:
    """That the weights can make. A checkpoint may lack the MTP layer of its config.json; its index alone is read."""
    index = folder / INDEX
    if index.is_file() and f'"model.layers.{model.num_hidden_layers}.' not in index.read_text():
        return 0
    return len(values.get("simulated_acceptance") or ()) if values.get("random_weights") else MOST_DRAFTS
