"""The section `tls` of a process's configuration, used by millrace_rpc/tls.py."""

from __future__ import annotations

from pathlib import Path

from pydantic import model_validator

from millrace_common.config import Config


class Tls(Config):
    """PEM files. A process that only calls others may do without `cert` and `key`."""

    cert: Path | None = None  # our certificate, followed by the intermediate ones
    key: Path | None = None
    ca: Path | None = None  # authority of the peers' certificates; absent: the system's authorities
    require_client_cert: bool = False  # mTLS: our servers talk to clients with a certificate signed by `ca` only
    server_name: str = ""  # the name in every worker's certificate; empty: the host of the address that is called

    @model_validator(mode="after")
    def _complete(self) -> Tls:
        if (self.cert is None) is not (self.key is None):
            raise ValueError("cert and key go together")
        if self.require_client_cert and self.ca is None:
            raise ValueError("require_client_cert needs ca, the authority of the clients' certificates")
        return self
