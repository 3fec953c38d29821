"""Certificates and API keys of a router, made once from its configuration."""

from __future__ import annotations

import time
from dataclasses import dataclass

from millrace_common.metrics import Metrics
from millrace_rpc.tls import Identity, identity_of

from millrace_router.config import RouterConfig
from millrace_router.edge.api_keys import Keys


@dataclass(frozen=True, slots=True)
class Security:
    inside: Identity | None  # towards workers and operators; None: plain
    public: Identity | None  # towards clients
    keys: Keys | None  # None: callers need no key


def make(config: RouterConfig, metrics: Metrics) -> Security:
    """Raises OSError for unusable files."""

    def on_reload(outcome: str) -> None:
        metrics.reloads.labels(what="api_keys", outcome=outcome).inc()

    inside = identity_of(config.tls, metrics)
    public = inside if config.public_tls is None else identity_of(config.public_tls, metrics)
    keys = None if config.api_keys is None else Keys(config.api_keys, time.monotonic, on_reload)
    return Security(inside, public, keys)
