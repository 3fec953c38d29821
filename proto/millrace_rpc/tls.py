"""TLS of every hop: one `Tls` section per process, and the `Identity` that its servers and clients share.

Certificates are files, checked again while the process runs. A server uses the new ones for the next handshake, without
a restart and without touching the connections it has; a client for its next channel. New files that do not fit together
are ignored (see millrace_common/reloaded.py).
"""

from __future__ import annotations

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from millrace_common.metrics import Metrics
from millrace_common.reloaded import Reloaded
from millrace_common.tls_config import Tls


@dataclass(frozen=True, slots=True)
class Material:
    """The files' bytes. Not to be printed."""

    chain: bytes | None
    key: bytes | None
    ca: bytes | None

    def __repr__(self) -> str:
        return "Material(...)"


class Identity:
    """Raises OSError, naming the file, when the files cannot be used at the start."""

    def __init__(
        self,
        tls: Tls,
        on_reload: Callable[[str], None] = lambda outcome: None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.tls = tls
        paths = [path for path in (tls.cert, tls.key, tls.ca) if path is not None]
        options: dict[str, Any] = {} if clock is None else {"clock": clock}
        try:
            self._files = Reloaded("TLS certificates", paths, lambda: load(tls), on_reload, **options)
        except ValueError as error:
            raise OSError(str(error)) from error
        self._channel_made = -1
        self._channel: grpc.ChannelCredentials | None = None
        self._context_made = -1
        self._context: ssl.SSLContext | None = None

    @property
    def version(self) -> int:
        """Another one after new files were loaded."""
        self._files.get()
        return self._files.version

    # ------------------------------------------------------------------------------------- servers

    def server_credentials(self) -> grpc.ServerCredentials:
        """The credentials of a gRPC server; every handshake checks the files for changes."""
        self._need_certificate()
        served = self.version

        def fetch() -> grpc.ServerCertificateConfiguration | None:
            """Called in a thread of gRPC's; None: nothing new."""
            nonlocal served
            if self.version == served:
                return None
            served = self._files.version
            return self._server_configuration()

        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(), fetch, require_client_authentication=self.tls.require_client_cert
        )

    def server_context(self) -> ssl.SSLContext:
        """The context of an HTTPS server: each handshake uses the current certificates."""
        self._need_certificate()
        entry = self._new_context()

        def at_hello(connection: ssl.SSLObject, name: str | None, context: ssl.SSLContext) -> None:
            connection.context = self._current_context()

        entry.sni_callback = at_hello
        return entry

    def _need_certificate(self) -> None:
        if self.tls.cert is None:
            raise OSError("tls.cert: a server needs a certificate")

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        files = self._files.get()
        return grpc.ssl_server_certificate_configuration([(files.key, files.chain)], files.ca)

    def _current_context(self) -> ssl.SSLContext:
        version = self.version
        if self._context is None or self._context_made != version:
            try:
                self._context, self._context_made = self._new_context(), version
            except (OSError, ValueError):  # the files change again just now
                if self._context is None:
                    raise
        return self._context

    def _new_context(self) -> ssl.SSLContext:
        tls = self.tls
        assert tls.cert is not None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(tls.cert, tls.key, password=_no_password)
        context.set_alpn_protocols(["http/1.1"])
        if tls.require_client_cert:
            context.load_verify_locations(cafile=tls.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    # ------------------------------------------------------------------------------------- clients

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """The credentials of a new channel. A channel keeps its certificates, so a client makes a new channel when
        `version` grows, or whenever it reconnects.
        """
        version = self.version
        if self._channel is None or self._channel_made != version:
            files = self._files.get()
            self._channel = grpc.ssl_channel_credentials(files.ca, files.key, files.chain)
            self._channel_made = version
        return self._channel


def identity_of(tls: Tls | None, metrics: Metrics) -> Identity | None:
    """The identity of a process with the metrics of the catalogue's PROCESS rows. OSError for unusable files."""
    if tls is None:
        return None
    return Identity(tls, lambda outcome: metrics.reloads.labels(what="certificates", outcome=outcome).inc())


def load(tls: Tls) -> Material:
    """Read and check. ValueError or OSError with the names of the files, never their content."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key, password=_no_password)
    except ssl.SSLError as error:
        raise ValueError(f"tls: {tls.cert} and {tls.key} are no certificate with its key ({error.reason})") from error
    except OSError as error:
        raise OSError(f"tls: cannot read {tls.cert} and {tls.key}: {error.strerror}") from error
    try:
        if tls.ca is not None:
            context.load_verify_locations(cafile=tls.ca)
    except ssl.SSLError as error:
        raise ValueError(f"tls: {tls.ca} holds no certificates ({error.reason})") from error
    except OSError as error:
        raise OSError(f"tls: cannot read {tls.ca}: {error.strerror}") from error
    return Material(*(path.read_bytes() if path is not None else None for path in (tls.cert, tls.key, tls.ca)))


def _no_password() -> str:
    """Raise an error instead of asking on the terminal."""
    raise ValueError("tls: the key is encrypted; give one without a password")
