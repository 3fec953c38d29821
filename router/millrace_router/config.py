"""The router's configuration. Times are in seconds."""

import enum
import itertools
import logging
import math
import re
from pathlib import Path
from typing import Annotated, Literal, Self

from millrace_common.config import PORT, Config, LogLevel, Seconds
from millrace_common.json_values import Json
from millrace_common.spans import Tracing
from millrace_common.split import Slo
from millrace_common.tls_config import Tls, exposed
from pydantic import Field, field_validator, model_validator

log = logging.getLogger(__name__)

ZONE = "topology.kubernetes.io/zone"
FORMER = frozenset({"local_prefill_tokens", "local_prefill_wait"})  # of `routing`, until the next release
NO_HURRY_S = 3600.0


class Policy(enum.StrEnum):
    """The choice of a role's replica; policy/choose.py maps each to its function."""

    ROUND_ROBIN = "round_robin"
    RANDOM = "random"
    POWER_OF_TWO = "power_of_two"
    LEAST_LOADED = "least_loaded"
    SESSION = "session"
    PREFIX_AWARE = "prefix_aware"
    KV_AWARE = "kv_aware"
    LENGTH_BUCKETS = "length_buckets"


class SloConfig(Config):
    """What a request should take at most. With a limit, requests are placed by predicted times."""

    ttft: Seconds | None = Field(None, gt=0)  # limit until the first token; none: no limit
    tpot: Seconds | None = Field(None, gt=0)  # limit of the mean time per further token; none: no limit

    @property
    def slo(self) -> Slo:
        return Slo(self.ttft or math.inf, self.tpot or math.inf)


class Routing(Config):
    """Parameters of the policies."""

    slo: SloConfig = SloConfig()
    # Duties of flexible workers. lead: set them when this router's turn comes; advise: only say what it would set;
    # off: set all to both
    duties: Literal["lead", "advise", "off"] = "lead"
    load_factor: float = Field(1.25, gt=1)  # session, topology: most sequences of a worker, as a multiple of the mean
    cache_weight: float = Field(1.0, ge=0)  # prefix_aware, kv_aware: weight of an uncached prompt token
    prefix_blocks: int = Field(200_000, ge=1)  # prefix_aware: pages in the index, some 160 bytes each
    length_bounds: tuple[int, ...] = (2048, 16384)  # length_buckets: the longest prompt of each bucket but the last
    length_label: str = ""  # length_buckets: the label with a worker's bucket (0, 1, …); empty: by rank
    topology: tuple[str, ...] = ("zone", "rack", "host")  # labels that make a decode worker near, widest first
    revision: str = ""  # revision whose workers come first; empty: workers without a revision

    @model_validator(mode="before")
    @classmethod
    def _former(cls, values: Json) -> Json:
        """Settings of before turn the placement by predicted times on, without a limit that matters."""
        if not isinstance(values, dict) or not FORMER & values.keys():
            return values
        log.warning("routing: %s: set routing.slo.ttft and routing.slo.tpot instead", ", ".join(FORMER & values.keys()))
        kept = {name: value for name, value in values.items() if name not in FORMER}
        on = any(values.get(name) for name in FORMER)
        return {"slo": {"ttft": NO_HURRY_S}, **kept} if on else kept

    @field_validator("length_bounds")
    @classmethod
    def _ascending(cls, bounds: tuple[int, ...]) -> tuple[int, ...]:
        if not bounds or bounds[0] < 1 or any(b <= a for a, b in itertools.pairwise(bounds)):
            raise ValueError("must be one or more token counts, ascending")
        return bounds


class Timeouts(Config):
    """Limits of a stage without progress."""

    no_workers: Seconds = Field(5.0, gt=0)  # wait for a routable pair, before NO_WORKERS
    queue: Seconds = Field(60.0, gt=0)  # wait for a worker with capacity
    prefill: Seconds = Field(120.0, gt=0)  # from submit to the first token, without waits that the worker reports
    handover: Seconds = Field(30.0, gt=0)  # from the prefill worker's token to the decode worker's first output
    stall: Seconds = Field(30.0, gt=0)  # between two outputs of the decode worker
    client: Seconds = Field(60.0, gt=0)  # after so long without a read by the client its stream ends: SLOW_CLIENT
    silence: Seconds = Field(3.0, gt=0)  # a worker whose load stream is silent for longer is lost
    drain: Seconds = 30.0  # time for running streams after SIGTERM


class RequestLimits(Config):
    """Of a request. flow/validate.py has the fixed limits; the model's own come from the workers."""

    # Engine steps that a client may be behind before its stream ends: SLOW_CLIENT. A busy router is some behind itself.
    unread: int = Field(16_384, ge=64)
    message_bytes: int = Field(8 << 20, ge=1, lt=16 << 20)  # bytes of a request


class BodyLimits(Config):
    """Of HTTP requests, until they are read."""

    timeout: Seconds = Field(120.0, gt=0)  # from the headers to the end of the body
    held: int = Field(256 << 20, ge=1)  # bytes of all bodies that are being received or read
    held_by_tenant: int = Field(64 << 20, ge=1)  # bytes of the bodies of one key


class Connections(Config):
    """Connections of clients. They end in good order after a while, so that a new router replica gets load."""

    max_age: Seconds | None = Field(300.0, gt=0)  # lifetime in seconds, give or take a tenth; none: no limit
    # The rest is of HTTP.
    idle: Seconds = Field(75.0, gt=0)  # seconds without a request, on every port; a proxy should close its own before
    most: int = Field(4096, ge=1)  # connections of the public port
    per_address: int | None = Field(None, ge=1)  # connections of one client's address, which may be a proxy's
    cors: tuple[str, ...] = ()  # origins of web pages that may read the answers, such as https://chat.example.com, or *
    keep_alive: Seconds = Field(10.0, gt=0)  # seconds of silence in a stream before a keep-alive

    @property
    def grpc_options(self) -> list[tuple[str, int]]:
        """Streams that still run at that age go on to their end: no grace is set."""
        return [] if self.max_age is None else [("grpc.max_connection_age_ms", round(self.max_age * 1000))]

    @field_validator("cors")
    @classmethod
    def _origins(cls, origins: tuple[str, ...]) -> tuple[str, ...]:
        for origin in origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/?#\s*]+", origin):
                raise ValueError(f"{origin!r} must be scheme://host, scheme://host:port or *")
        return origins


class StaticTarget(Config):
    """A worker of the list `workers`. An address alone is short for one without the rest."""

    address: Annotated[str, Field(pattern=r"^\S+:\d{1,5}$"), PORT]
    revision: str = ""
    topology: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _address_alone(cls, value: Json) -> Json:
        return {"address": value} if isinstance(value, str) else value


class KubernetesConfig(Config):
    objects: Literal["pods", "endpointslices"] = "pods"
    selector: str = ""  # label selector; for EndpointSlices such as kubernetes.io/service-name=workers
    namespace: str = ""  # empty: the router's own, outside a cluster "default"
    port: Annotated[int, Field(ge=1, le=65535)] | str = "grpc"  # number or name of the container's or slice's port
    # label=value: a pod whose label has another value is a follower and ignored; a pod without the label is a worker
    leader: str = Field("leaderworkerset.sigs.k8s.io/worker-index=0", pattern=r"^[^=\s]+=[^=\s]*$")
    topology: dict[str, str] = Field(default_factory=lambda: {"zone": ZONE})  # name: the pod's label; host is known
    kubeconfig: Path | None = None  # file, read with its current context; else the pod's service account
    api: str = ""  # URL of an API server that asks for no credentials, such as `kubectl proxy`


class DiscoveryConfig(Config):
    kind: Literal["static", "kubernetes"] = "static"
    kubernetes: KubernetesConfig = KubernetesConfig()

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> Self:
        if self.kind == "kubernetes" and not self.kubernetes.selector:
            raise ValueError("kubernetes.selector: required with kind=kubernetes")
        return self


class RetryBudget(Config):
    ratio: float = Field(1.0, ge=0)  # retries per request in the window; 1: every worker may die once
    per_s: float = Field(5.0, ge=0)  # retries per second that are always allowed


class OutlierRules(Config):
    consecutive: int = Field(5, ge=1)  # failures in a row that eject a worker
    pause: Seconds = Field(10.0, gt=0)  # length of an ejection, times the number of ejections so far


class Resilience(Config):
    retries: RetryBudget = RetryBudget()
    outliers: OutlierRules = OutlierRules()


Address = Annotated[str, Field(pattern=r"^([^:\s]+|\[[0-9A-Fa-f:.]+\]):\d{1,5}$"), PORT]


class RouterConfig(Config):
    model: str  # folder with tokenizer.json and tokenizer_config.json; the rest of the checkpoint is not read
    chat_template: str = ""  # template to use instead of the model's own
    # Texts of clients that may have special tokens; in the others they are text. prompts: those without a template.
    special_tokens_in: tuple[Literal["chats", "prompts"], ...] = ("prompts",)
    aliases: tuple[str, ...] = ()  # further names of the served model
    workers: tuple[StaticTarget, ...] = ()  # with discovery.kind=static; each worker reports its own role
    discovery: DiscoveryConfig = DiscoveryConfig()
    grpc: Address = "127.0.0.1:0"  # host:port of the gRPC API; port 0: any free one
    http: Address = "127.0.0.1:0"  # of the HTTP APIs
    admin: Address = "127.0.0.1:0"  # of the admin API over gRPC
    admin_http: Address = "127.0.0.1:0"  # of the admin API over HTTP
    metrics: Address | None = None  # for plain /metrics, /health, /ready; none: on the HTTP port
    health: Address | None = None  # address of plain grpc.health.v1; the gRPC port has it too
    tls: Tls | None = None  # of every port, and towards the workers; none: plain
    public_tls: Tls | None = None  # of the gRPC and HTTP APIs, where clients trust another authority than the workers
    api_keys: Path | None = None  # file of API keys; none: clients need no key
    secret: Path | None = None  # file of the deployment's secret, the same on every router and worker
    api_keys_keep: bool = False  # while the file cannot be used, keep the old keys; else refuse every request
    api_keys_plaintext: bool = False  # accept keys from other hosts without TLS: a proxy or a mesh encrypts them
    tracing: Tracing = Tracing()
    prefill_policy: Policy = Policy.LEAST_LOADED
    decode_policy: Policy = Policy.LEAST_LOADED
    routing: Routing = Routing()
    queue_size: int = Field(1024, ge=1)  # requests that may wait
    max_attempts: int = Field(4, ge=1)  # attempts of one request, the first included
    strict_tools: bool = False  # refuse tools that are not functions; else leave them out
    resilience: Resilience = Resilience()
    timeouts: Timeouts = Timeouts()
    limits: RequestLimits = RequestLimits()
    connections: Connections = Connections()
    bodies: BodyLimits = BodyLimits()
    stream_interval: float = Field(0.0, ge=0, le=1)  # seconds between two rounds of sending; 0: as the load allows
    log_level: LogLevel = "INFO"

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        plain = self.tls is None and self.public_tls is None and not self.api_keys_plaintext
        for name, address in (("grpc", self.grpc), ("http", self.http)):
            if plain and self.api_keys is not None and exposed(address.rpartition(":")[0], None):
                text = "needs tls or public_tls; set api_keys_plaintext=true if a proxy or a mesh encrypts them"
                raise ValueError(f"api_keys: {name}={address} takes keys from other hosts, which {text}")
        if self.bodies.held_by_tenant < self.limits.message_bytes or self.bodies.held < self.bodies.held_by_tenant:
            text = "must be at least limits.message_bytes and at most bodies.held"
            raise ValueError(f"bodies.held_by_tenant: {text}")
        for key in ("admin", "admin_http"):
            if self.secret is None and exposed(getattr(self, key).rpartition(":")[0], self.tls):
                known = "or mutual TLS (tls.require_client_cert): other hosts reach that port"
                raise ValueError(f"secret: required with {key}={getattr(self, key)}, {known}")
        if self.workers and self.discovery.kind != "static":
            raise ValueError(f"workers: only with discovery.kind=static, not {self.discovery.kind}")
        return self
