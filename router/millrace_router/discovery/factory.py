"""The source that the configuration asks for."""

from __future__ import annotations

from millrace_router.discovery.base import Source
from millrace_router.discovery.config import DiscoveryConfig, Kind
from millrace_router.discovery.dns import DnsSource
from millrace_router.discovery.static import StaticSource


def make_source(config: DiscoveryConfig) -> Source:
    match config.kind:
        case Kind.STATIC:
            return StaticSource(config.static)
        case Kind.DNS:
            return DnsSource(config.dns)
        case Kind.KUBERNETES:
            from millrace_router.discovery.kubernetes import KubernetesSource  # its client is needed for nothing else

            return KubernetesSource(config.kubernetes)
