"""The router's configuration."""

from __future__ import annotations

import enum

from millrace_rpc.config import Config
from pydantic import Field


class Policy(enum.StrEnum):
    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"


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
    logit_bias: int = Field(1024, ge=0)
    request_id_chars: int = Field(128, ge=1)
    priority: int = Field(100, ge=0)  # -priority to +priority
    message_bytes: int = Field(8 << 20, ge=1, lt=16 << 20)  # below the transport's own limit, whose error is less clear


_ADDRESS = r"^[^:\s]+:\d{1,5}$"


class RouterConfig(Config):
    model: str  # folder with tokenizer.json and tokenizer_config.json; the rest of the checkpoint is not read
    workers: tuple[str, ...] = ()  # gRPC addresses; each worker says itself which role it has
    grpc: str = Field("127.0.0.1:0", pattern=_ADDRESS)  # host:port to listen on; port 0: any free one
    http: str = Field("127.0.0.1:0", pattern=_ADDRESS)
    admin: str = Field("127.0.0.1:0", pattern=_ADDRESS)
    prefill_policy: Policy = Policy.LEAST_LOADED
    decode_policy: Policy = Policy.LEAST_LOADED
    queue_size: int = Field(1024, ge=1)  # waiting continuations
    max_attempts: int = Field(4, ge=1)  # tries of one continuation, the first included
    timeouts: Timeouts = Timeouts()
    limits: Limits = Limits()
    gc_warn_s: float = Field(0.05, gt=0)  # a collection pause above this is logged
    log_level: str = "INFO"
