"""Access to a router with TLS or API keys: the options of a command."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from millrace_cli.errors import CommandError

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
    Path | None,
    typer.Option("--secret-file", envvar="MILLRACE_SECRET_FILE", help="File of the deployment's secret."),
]


def _api_key(key: str) -> str:
    if not (key.isascii() and key.isprintable()):
        raise CommandError("--api-key or MILLRACE_API_KEY has a character that no header can carry", code=2)
    return key


def _grpc_address(given: str | list[str]) -> str | list[str]:
    for address in [given] if isinstance(given, str) else given:
        if ":" not in address or address.startswith(("http://", "https://")):
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


def identity(ca: Path | None, cert: Path | None, key: Path | None, name: str = "") -> Identity | None:
    """None: plain."""
    if ca is None and cert is None and key is None:
        return None
    from millrace_common.tls_config import Tls
    from millrace_rpc.tls import Identity

    try:
        return Identity(Tls(ca=ca, cert=cert, key=key, server_name=name))
    except (OSError, ValueError) as error:
        raise CommandError(str(error), code=2) from error


def token(secret: Path | None) -> str:
    """Empty without a secret."""
    from millrace_common.deployment_secret import read
    from millrace_rpc.access import token

    try:
        return token(read(secret))
    except OSError as error:
        raise CommandError(f"--secret-file: {error}", code=2) from error


def ssl_context(ca: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext | bool:
    """For HTTPS. True: the system's authorities."""
    if ca is None and cert is None and key is None:
        return True
    import ssl

    try:
        context = ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key)
    except OSError as error:  # of the files, and ssl's own
        raise CommandError(f"--tls-ca, --tls-cert, --tls-key: {error}", code=2) from error
    return context
