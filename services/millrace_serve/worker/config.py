"""The configuration of a worker: one object for its frontend and all of its ranks."""

import enum
from pathlib import Path
from typing import Annotated, Literal, Self

from millrace_common.config import Config, Count, LogLevel, OrAuto, Seconds
from millrace_common.json_values import Json, JsonObject
from millrace_common.model_files import read_object
from millrace_common.spans import Tracing
from millrace_common.tls_config import Tls, exposed
from pydantic import Field, model_validator

from millrace_serve.engine.config import WARM_UP_OUTPUTS, Execution, Limits, Role
from millrace_serve.engine.sim.runner import SimSettings
from millrace_serve.plan.facts import gpu_here, memory_limit
from millrace_serve.plan.settings import Goal, Setup, decide, filled, setup_of

MOST_RANKS = 512  # of a worker
DEFAULT_PAGES = 1025  # where the device's memory is not planned
SIM_CONTEXT = 8192


class EngineKind(enum.StrEnum):
    MODEL = "model"
    SIM = "sim"  # a timing model with a token oracle: no weights, no torch in any process


class WorkerTimeouts(Config):
    """Seconds."""

    start: Seconds = Field(600.0, gt=0)  # until every rank is ready to warm up; later the time that a rank announces
    warmup: Seconds = Field(120.0, gt=0)  # for all warm-up requests of one call
    drain: Seconds = 30.0  # time for running work after SIGTERM
    stall: Seconds = Field(5.0, gt=0)  # decode: silence of a Fetch stream, or time of one read
    lease: Seconds = Field(30.0, gt=0)  # prefill: how long pages are held after the reader's last message
    idle: Seconds = Field(75.0, gt=0)  # how long a connection to the metrics port may be idle

    @property
    def fetch_wait(self) -> float:
        """Prefill: how long a Fetch waits that came before its prompt was submitted."""
        return 2 * self.stall

    @property
    def heartbeat(self) -> float:
        """Prefill: between two messages of a Fetch stream, so that neither its silence nor its lease ends it."""
        return min(self.stall / 5, self.lease / 3)


class WorkerConfig(Execution):
    role: Role = Role.DECODE
    goal: Goal = Goal.BALANCED  # what auto keys favour on a GPU (plan/settings.py)
    host: str = "127.0.0.1"
    grpc_port: int = Field(0, ge=0, le=65535)  # 0: any free port
    metrics_port: int = Field(0, ge=0, le=65535)  # 0: any free port
    health_port: int | None = Field(None, ge=0, le=65535)  # port of plain grpc.health.v1; the gRPC port has it too
    worker_id: str = ""  # name that outlives restarts; empty: the epoch
    engine: EngineKind = EngineKind.MODEL
    model: Path | None = None  # checkpoint folder
    weights_root: Path | None = None  # folder below which SetWeights may read; none: the folder that has `model`
    served_name: str = ""  # model name in the APIs; empty: the folder's name
    limits: Limits  # max_model_len follows from the model unless it is set
    sim: SimSettings = SimSettings()
    dp: int = Field(1, ge=1, le=MOST_RANKS)  # replicas
    tp: int = Field(1, ge=1, le=MOST_RANKS)  # ranks of a replica
    expert_tp: Annotated[bool, OrAuto()] = False  # each rank holds a part of every routed expert; needs dp = 1
    device: Literal["cpu", "cuda"] = "cpu"
    first_gpu: Count = Field(0, ge=0)  # index of rank 0's GPU among those that the process sees; the next ranks follow
    dtype: Literal["float32", "bfloat16"]  # of activations; default: bfloat16 on a GPU, float32 on a CPU
    cache_dir: Path = Path("~/.cache/millrace")  # folder of compiled kernels (worker/caches.py)
    launcher: Literal["local", "ray"] = "local"
    timeouts: WorkerTimeouts = WorkerTimeouts()
    profile_dir: Path | None = None  # folder for torch.profiler's traces; none: profiles are refused
    secret: Path | None = None  # file of the deployment's secret, the same on every router and worker
    tls: Tls | None = None  # of the gRPC port, and towards prefill workers; none: plain, like the metrics port
    tracing: Tracing = Tracing()
    log_level: LogLevel = "INFO"

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, values: Json) -> Json:
        """Fill in values that follow from others: the context from the checkpoint, dtype from the device, and what is
        `auto` or absent from the plan.
        """
        if not isinstance(values, dict):
            return values
        on_cuda = values.get("device") == "cuda"
        planned = on_cuda and values.get("engine") != EngineKind.SIM
        limits = values.get("limits") or {}
        if isinstance(limits, dict):
            pages = "auto" if planned else DEFAULT_PAGES
            limits = {"num_pages": pages, "max_model_len": _context_of(values), **limits}
        values = {"dtype": "bfloat16" if on_cuda else "float32", **values, "limits": limits}
        setup = setup_of(values, gpu_here(), memory_limit()) if planned else None
        return filled(values, decide(setup) if setup else ())

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.engine is EngineKind.MODEL and self.model is None:
            raise ValueError("model: a checkpoint folder is required unless engine=sim")
        if self.num_ranks > MOST_RANKS:
            raise ValueError(f"dp={self.dp}: must be at most {MOST_RANKS // self.tp} with tp={self.tp}")
        pages, size = self.limits.num_pages, self.limits.page_size
        if pages != "auto" and (pages - 1) * size < WARM_UP_OUTPUTS:
            least = 1 + -(-WARM_UP_OUTPUTS // size)
            raise ValueError(f"limits.num_pages={pages}: must be at least {least} with limits.page_size={size}")
        if self.expert_tp and self.dp > 1:
            raise ValueError(f"expert_tp: needs dp=1, not {self.dp}: an expert's parts are summed within a replica")
        if self.dense_tp and self.tp % self.dense_tp:
            raise ValueError(f"dense_tp={self.dense_tp}: must divide tp={self.tp}")
        if self.dtype == "float32" and (never := {"flash_mla", "flashinfer"} & {*self.attention}):
            raise ValueError(f"attention: {', '.join(sorted(never))} takes dtype=bfloat16, not float32")
        if self.limits.context_parallel_tokens and (self.dp == 1 or self.limits.context_parallel_tokens < 2 * self.dp):
            raise ValueError("limits.context_parallel_tokens: needs dp > 1 and at least 2 tokens per replica")
        if self.secret is None and exposed(self.host, self.tls):
            known = "or mutual TLS (tls.require_client_cert): other hosts reach the gRPC port"
            raise ValueError(f"secret: required with host={self.host}, {known}")
        if self.limits.num_pages == "auto" and (self.device == "cpu" or self.engine is EngineKind.SIM):
            raise ValueError("limits.num_pages: auto needs device=cuda and engine=model; set a number")
        return self

    @property
    def num_ranks(self) -> int:
        return self.dp * self.tp

    def setup(self, gpu: str, pod_memory: int = 0) -> Setup | None:
        """What its plan follows from, on this kind of GPU, as `setup_of` has it. None: it has no plan."""
        planned = self.device == "cuda" and self.engine is EngineKind.MODEL
        return setup_of(self.model_dump(), gpu, pod_memory) if planned else None

    @property
    def checkpoints(self) -> Path | None:
        return self.weights_root or (self.model and self.model.parent)

    @property
    def model_name(self) -> str:
        return self.served_name or (self.model.name if self.model else str(self.engine))


def _context_of(values: JsonObject) -> int:
    """Tokens that the model's positions allow. A checkpoint that cannot be read gets its error when it is loaded."""
    if values.get("engine") == EngineKind.SIM or not values.get("model"):
        return SIM_CONTEXT
    try:
        return int(read_object(Path(values["model"]) / "config.json")["max_position_embeddings"])
    except (ValueError, KeyError, TypeError):
        return SIM_CONTEXT
