"""The section `tls` of a process's configuration, used by millrace_rpc/tls.py."""

import ipaddress
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from millrace_common.config import Config

Peer = Literal["router", "worker", "admin"]
Names = dict[Peer, tuple[str, ...]]
PEERS: Names = {"router": ("millrace-router",), "worker": ("millrace-worker",), "admin": ("millrace-admin",)}


class Tls(Config):
    """PEM files. A process that only calls others may do without `cert` and `key`."""

    cert: Path | None = None  # certificate, followed by the intermediate ones
    key: Path | None = None
    ca: Path | None = None  # CA of the other side's certificates; absent: the system's CAs
    require_client_cert: bool = False  # mTLS: servers accept only clients with a certificate of `ca`
    server_name: str = ""  # name in every worker's certificate; empty: the host of its address
    peers: Names = Field(PEERS)  # mTLS: names of certificates that may call internal ports

    @field_validator("peers")
    @classmethod
    def _every_role(cls, given: Names) -> Names:
        return {**PEERS, **given}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.cert is None) is not (self.key is None):
            raise ValueError("cert and key go together")
        if self.require_client_cert and self.ca is None:
            raise ValueError("require_client_cert needs ca, the authority of the clients' certificates")
        return self


def exposed(host: str, tls: Tls | None) -> bool:
    """Whether processes of other machines can call a port of `host` without a certificate."""
    if tls is not None and tls.require_client_cert:
        return False
    try:
        return not ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host != "localhost"
