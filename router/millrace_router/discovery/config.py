"""The configuration of discovery."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Any, Literal

from millrace_common.config import Config
from pydantic import Field, model_validator

ZONE = "topology.kubernetes.io/zone"


class Kind(enum.StrEnum):
    STATIC = "static"
    DNS = "dns"
    KUBERNETES = "kubernetes"


class StaticTarget(Config):
    """A worker of the list `workers`. An address alone is short for one without the rest."""

    address: str = Field(pattern=r"^\S+:\d{1,5}$")
    revision: str = ""
    topology: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _address_alone(cls, value: Any) -> Any:
        return {"address": value} if isinstance(value, str) else value


class DnsConfig(Config):
    """Every address of every name is a worker: headless Services, or plain round-robin records."""

    names: tuple[str, ...] = ()  # host:port
    interval_s: float = Field(5.0, gt=0)  # between two look-ups


class KubernetesConfig(Config):
    objects: Literal["pods", "endpointslices"] = "pods"
    selector: str = ""  # of labels; of EndpointSlices for example kubernetes.io/service-name=workers
    namespace: str = ""  # empty: the router's own, outside a cluster "default"
    port: int | str = "grpc"  # number, or the name of a container's (slice's) port
    # label=value: a pod whose label has another value is a follower and ignored; a pod without the label is a worker
    leader: str = Field("leaderworkerset.sigs.k8s.io/worker-index=0", pattern=r"^[^=\s]+=[^=\s]*$")
    role_label: str = "app.kubernetes.io/component"  # prefill, decode or unified, until the worker reports its role
    revision_label: str = "millrace/revision"  # of a pod, or of an EndpointSlice: the revision of its pool
    topology: dict[str, str] = Field(default_factory=lambda: {"zone": ZONE})  # our name: the pod's label; host is known
    kubeconfig: Path | None = None  # file; else the pod's service account
    context: str = ""  # of the kubeconfig
    api: str = ""  # URL of an API server that asks for no credentials, such as `kubectl proxy`


class DiscoveryConfig(Config):
    kind: Kind = Kind.STATIC
    dns: DnsConfig = DnsConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()

    @model_validator(mode="after")
    def _has_what_its_kind_needs(self) -> DiscoveryConfig:
        if self.kind is Kind.DNS and not self.dns.names:
            raise ValueError("dns.names: required with kind=dns")
        for name in self.dns.names:
            host, _, port = name.rpartition(":")
            if not host or not port.isdecimal():
                raise ValueError(f"dns.names: {name!r} is not host:port")
        if self.kind is Kind.KUBERNETES and not self.kubernetes.selector:
            raise ValueError("kubernetes.selector: required with kind=kubernetes")
        return self
