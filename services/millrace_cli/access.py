"""Access to a router with TLS or API keys: the options of a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace_cli.errors import CommandError, told

if TYPE_CHECKING:
    import ssl

    from millrace_rpc.tls import Identity


def _tls(name: str, text: str) -> object:
    """The variables are set in a router's pod, for `kubectl exec`."""
    return typer.Option(f"--tls-{name}", envvar=f"MILLRACE_TLS_{name.upper()}", help=text)


Ca = Annotated[Path | None, _tls("ca", "Use TLS; the authority of the server's certificate.")]
Cert = Annotated[Path | None, _tls("cert", "Client certificate, for mTLS.")]
Key = Annotated[Path | None, _tls("key", "Private key of --tls-cert.")]
Name = Annotated[str, _tls("name", "The name in the server's certificate, if it is not the host's.")]
Secret = Annotated[
    Path | None, typer.Option("--secret-file", envvar="MILLRACE_SECRET_FILE", help="File of the deployment's secret.")
]


def _api_key(key: str) -> str:
    if not (key.isascii() and key.isprintable()):
        raise CommandError("--api-key or MILLRACE_API_KEY has a character that no header can carry", code=2)
    return key


def _grpc_address(given: str | list[str]) -> str | list[str]:
    for address in [given] if isinstance(given, str) else given:
        host, _, port = address.rpartition(":")
        if not host or "/" in host or not (port.isdecimal() and 0 < int(port) < 1 << 16):
            raise CommandError(f"{address!r} is not HOST:PORT of a gRPC port, such as 127.0.0.1:50051", code=2)
    return given


def address(text: str) -> object:
    return typer.Option("--address", help=text, callback=_grpc_address)


Addresses = Annotated[
    list[str], typer.Argument(metavar="ADDRESS", help="The workers' gRPC addresses.", callback=_grpc_address)
]
ApiKey = Annotated[
    str, typer.Option(envvar="MILLRACE_API_KEY", help="API key. Prefer the environment.", callback=_api_key)
]


def _plain(ca: Path | None, cert: Path | None, key: Path | None) -> bool:
    if (cert is None) != (key is None):
        raise CommandError("--tls-cert and --tls-key go together", code=2)
    return ca is None and cert is None


def identity(ca: Path | None, cert: Path | None, key: Path | None, name: str = "") -> Identity | None:
    """None: plain."""
    if _plain(ca, cert, key):
        return None
    from millrace_common.tls_config import Tls
    from millrace_rpc.tls import Identity

    with told(OSError, ValueError):
        return Identity(Tls(ca=ca, cert=cert, key=key, server_name=name))


def token(secret: Path | None) -> str:
    """Empty without a secret."""
    from millrace_common.deployment_secret import read
    from millrace_rpc.access import token

    with told(OSError, of="--secret-file"):
        return token(read(secret))


def ssl_context(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext | bool:
    """For HTTPS. True: the system's authorities."""
    if _plain(ca, cert, key):
        return True
    import ssl

    with told(OSError, of="--tls-ca, --tls-cert, --tls-key"):  # of the files, and ssl's own
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    return context
