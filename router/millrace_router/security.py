"""What a router's configuration says about trust, made once: its certificates and its callers' keys."""

from __future__ import annotations

import time
from dataclasses import dataclass

from millrace_rpc.metrics import Metrics
from millrace_rpc.tls import Identity, Tls

from millrace_router.config import RouterConfig
from millrace_router.tenants import Keys


@dataclass(frozen=True, slots=True)
class Security:
    inside: Identity | None  # towards workers and operators; None: plain
    public: Identity | None  # towards clients
    keys: Keys | None  # None: everybody may call


def make(config: RouterConfig, metrics: Metrics) -> Security:
    """OSError for files that cannot be used."""

    def identity(tls: Tls | None) -> Identity | None:
        return None if tls is None else Identity(tls, lambda outcome: count("certificates", outcome))

    def count(what: str, outcome: str) -> None:
        metrics.reloads.labels(what=what, outcome=outcome).inc()

    inside = identity(config.tls)
    public = inside if config.public_tls is None else identity(config.public_tls)
    keys = config.api_keys and Keys(config.api_keys, time.monotonic, lambda outcome: count("api_keys", outcome))
    return Security(inside, public, keys)
