"""TLS of every hop: one `Tls` section per process, and the `Identity` that its servers and clients share.

Certificates are files, checked again while the process runs (millrace_common/reloaded.py). A server uses the new ones
for the next handshake, a client for its next channel.
"""

import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from millrace_common.metrics import Metrics
from millrace_common.reloaded import Reloaded
from millrace_common.tls_config import Tls


@dataclass(frozen=True, slots=True, eq=False)
class Material:
    context: ssl.SSLContext  # of an HTTPS server
    server: grpc.ServerCertificateConfiguration | None  # None: there is no certificate
    client: grpc.ChannelCredentials


class Identity:
    """Raises OSError, naming the section of the configuration and the file, when files are unusable at the start."""

    def __init__(
        self,
        tls: Tls,
        on_reload: Callable[[str], None] = lambda outcome: None,
        clock: Callable[[], float] = time.monotonic,
        section: str = "tls",
    ) -> None:
        self.tls, self._section = tls, section
        paths = [path for path in (tls.cert, tls.key, tls.ca) if path is not None]
        self._files = Reloaded(section, "TLS certificates", paths, lambda: load(tls), on_reload, clock)

    @property
    def version(self) -> object:
        """Another object after new files were loaded."""
        return self._files.get()

    def server_credentials(self) -> grpc.ServerCredentials:
        """The credentials of a gRPC server; every handshake checks the files for changes."""
        self._need_certificate()
        served = self._files.get()

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Called in a thread of gRPC's; None: nothing new."""
            nonlocal served
            before, served = served, self._files.get()
            return None if served is before else served.server

        return grpc.dynamic_ssl_server_credentials(
            served.server, fetch, require_client_authentication=self.tls.require_client_cert
        )

    def server_context(self) -> ssl.SSLContext:
        """The context of an HTTPS server: each handshake uses the current certificates."""
        self._need_certificate()
        entry = load(self.tls).context  # of its own, because a connection keeps the callback of its first context

        def at_hello(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self._files.get().context

        entry.sni_callback = at_hello
        return entry

    def _need_certificate(self) -> None:
        if self.tls.cert is None:
            raise OSError(f"{self._section}.cert: required: a server needs a certificate")

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """The credentials of a new channel. A channel keeps its certificates, so a client makes a new channel when
        `version` changes, or whenever it reconnects.
        """
        return self._files.get().client


def identity_of(tls: Tls | None, metrics: Metrics, section: str = "tls") -> Identity | None:
    """The identity of a process with the metrics of the catalogue's PROCESS rows. Raises as `Identity` does."""
    if tls is None:
        return None
    count = metrics.reloads.labels
    return Identity(tls, lambda outcome: count(what="certificates", outcome=outcome).inc(), section=section)


def load(tls: Tls) -> Material:
    """Read and check. ValueError or OSError with the names of the files, never their content."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    files, fault = f"{tls.cert} and {tls.key}", "are no certificate with its key"
    try:
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key, password=_no_password)
        files, fault = str(tls.ca), "holds no certificates"
        if tls.ca is not None:
            context.load_verify_locations(cafile=tls.ca)
    except ssl.SSLError as error:
        raise ValueError(f"{files} {fault} ({error.reason})") from error
    except OSError as error:
        raise OSError(f"cannot read {files}: {error.strerror}") from error
    if tls.require_client_cert:
        context.verify_mode = ssl.CERT_REQUIRED
    chain, key, ca = (path.read_bytes() if path is not None else None for path in (tls.cert, tls.key, tls.ca))
    server = grpc.ssl_server_certificate_configuration([(key, chain)], ca) if chain is not None else None
    return Material(context, server, grpc.ssl_channel_credentials(ca, key, chain))


def _no_password() -> str:
    """Raise an error instead of asking on the terminal."""
    raise ValueError("the key is encrypted; give one without a password")
