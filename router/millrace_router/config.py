"""The router's configuration."""

from __future__ import annotations

import enum
import itertools
from pathlib import Path

from millrace_common.config import Config
from millrace_common.spans import Tracing
from millrace_common.tls_config import Tls
from pydantic import Field, field_validator, model_validator

from millrace_router.discovery.config import DiscoveryConfig, Kind, StaticTarget
from millrace_router.resilience.config import Resilience


class Policy(enum.StrEnum):
    """How a role's replica is chosen; policy/ has a file for each."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    POWER_OF_TWO = "power_of_two"
    LEAST_LOADED = "least_loaded"
    SESSION = "session"
    PREFIX_AWARE = "prefix_aware"
    KV_AWARE = "kv_aware"
    LENGTH_BUCKETS = "length_buckets"


class Routing(Config):
    """Parameters of the policies."""

    load_factor: float = Field(1.25, gt=1)  # session, topology: who has more sequences than this x the mean is full
    load_slack: int = Field(4, ge=1)  # session, topology: so many sequences are never too many
    cache_weight: float = Field(1.0, ge=0)  # prefix_aware, kv_aware: an uncached prompt token in tokens of load
    prefix_blocks: int = Field(200_000, ge=1)  # prefix_aware: pages remembered, some 130 bytes each
    length_bounds: tuple[int, ...] = (2048, 16384)  # length_buckets: the longest prompt of each bucket but the last
    length_label: str = ""  # length_buckets: the label with a worker's bucket (0, 1, …); empty: by rank
    topology: tuple[str, ...] = ("zone", "rack", "host")  # labels, widest first, that make a decode worker near
    local_prefill_tokens: int = Field(0, ge=0)  # shorter uncached prompts are run by the decode worker itself; 0: none
    decisions: int = Field(1024, ge=0)  # kept to be explained
    revision: str = ""  # of the workers that are asked first: discovery knows it; empty: of those that have none

    @field_validator("length_bounds")
    @classmethod
    def _ascending(cls, bounds: tuple[int, ...]) -> tuple[int, ...]:
        if not bounds or bounds[0] < 1 or any(b <= a for a, b in itertools.pairwise(bounds)):
            raise ValueError("must be one or more token counts, ascending")
        return bounds


class Timeouts(Config):
    """How long a request may stay in a stage without progress, in seconds."""

    no_workers: float = Field(5.0, gt=0)  # before NO_WORKERS, for a request that came when no pair was routable
    queue: float = Field(60.0, gt=0)  # waiting for a worker with credits
    prefill: float = Field(120.0, gt=0)  # from submit to the first token
    handover: float = Field(30.0, gt=0)  # from the prefill worker's token to the decode worker's first output
    stall: float = Field(30.0, gt=0)  # between two outputs of the decode worker
    connect: float = Field(3.0, gt=0)  # a worker's answer to GetInfo and to the Link's hello
    silence: float = Field(3.0, gt=0)  # a worker whose load stream is silent for longer is lost
    warmup: float = Field(120.0, gt=0)  # one warm-up or GC freeze
    drain: float = Field(30.0, ge=0)  # running streams after SIGTERM


class Limits(Config):
    """What a request may ask for. The model's own limits (context, vocabulary) come from the workers."""

    n: int = Field(16, ge=1)
    stop: int = Field(16, ge=0)
    stop_chars: int = Field(256, ge=1)
    stop_token_ids: int = Field(64, ge=0)
    tools: int = Field(128, ge=0)
    logit_bias: int = Field(1024, ge=0)
    request_id_chars: int = Field(128, ge=1)
    session_id_chars: int = Field(512, ge=1)
    priority: int = Field(100, ge=0)  # -priority to +priority
    unread: int = Field(16_384, ge=1)  # engine steps that a client may be behind before its stream ends: SLOW_CLIENT
    message_bytes: int = Field(8 << 20, ge=1, lt=16 << 20)  # below the transport's own limit, whose error is less clear


class Connections(Config):
    """Of clients. They end in good order now and then, so that a new router replica gets its share of the load."""

    max_age: float | None = Field(300.0, gt=0)  # seconds, give or take a tenth; none: they live for ever
    grace: float | None = Field(None, gt=0)  # seconds for gRPC streams that still run then; none: to their end
    max_requests: int = Field(10_000, ge=1)  # on one HTTP connection

    @property
    def grpc_options(self) -> list[tuple[str, int]]:
        times = {"grpc.max_connection_age_ms": self.max_age, "grpc.max_connection_age_grace_ms": self.grace}
        return [(name, round(seconds * 1000)) for name, seconds in times.items() if seconds is not None]


_ADDRESS = r"^([^:\s]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}$"


class RouterConfig(Config):
    model: str  # folder with tokenizer.json and tokenizer_config.json; the rest of the checkpoint is not read
    chat_template: str = ""  # a file to use instead of the model's own template
    aliases: tuple[str, ...] = ()  # further names under which clients may ask for the model that is served
    workers: tuple[str, ...] = ()  # short for discovery.static; each worker says itself which role it has
    discovery: DiscoveryConfig = DiscoveryConfig()
    grpc: str = Field("127.0.0.1:0", pattern=_ADDRESS)  # host:port to listen on; port 0: any free one
    http: str = Field("127.0.0.1:0", pattern=_ADDRESS)
    admin: str = Field("127.0.0.1:0", pattern=_ADDRESS)  # gRPC
    admin_http: str = Field("127.0.0.1:0", pattern=_ADDRESS)
    metrics: str | None = Field(None, pattern=_ADDRESS)  # plain /metrics, /health and /ready; none: beside the HTTP API
    health: str | None = Field(None, pattern=_ADDRESS)  # plain grpc.health.v1, beside that of the gRPC API
    tls: Tls | None = None  # of every port, and towards the workers; none: plain
    public_tls: Tls | None = None  # of the gRPC and HTTP APIs, where clients trust another authority than the workers
    api_keys: Path | None = None  # file of edge/tenants.py; none: everybody may call
    tracing: Tracing = Tracing()
    prefill_policy: Policy = Policy.LEAST_LOADED
    decode_policy: Policy = Policy.LEAST_LOADED
    routing: Routing = Routing()
    queue_size: int = Field(1024, ge=1)  # waiting continuations
    look_ahead: int = Field(8, ge=1)  # those that are tried while the first ones find no worker
    max_attempts: int = Field(4, ge=1)  # tries of one continuation, the first included
    resilience: Resilience = Resilience()
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    connections: Connections = Connections()
    stream_interval: float = Field(0.0, ge=0, le=1)  # seconds between two rounds of sending; 0: as the load allows
    gc_warn_s: float = Field(0.05, gt=0)  # a collection pause above this is logged
    log_level: str = "INFO"

    @model_validator(mode="after")
    def _workers_are_static(self) -> RouterConfig:
        if self.workers and self.discovery.kind is not Kind.STATIC:
            raise ValueError(f"workers: only with discovery.kind=static, not {self.discovery.kind}")
        return self

    @property
    def found_by(self) -> DiscoveryConfig:
        """`discovery` with `workers` in it."""
        static = (*(StaticTarget(address=address) for address in self.workers), *self.discovery.static)
        return self.discovery.model_copy(update={"static": static})
