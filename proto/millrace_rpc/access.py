"""Who may call the ports inside a deployment: routers, workers and operators.

With mutual TLS the caller is who its certificate names (`tls.peers`), and `MAY` is what each of them needs. Without it
a caller sends a token made of the deployment's secret, which opens everything. Where neither is configured, the port
is open: configurations allow that on a loopback address only (`exposed` in millrace_common/tls_config.py).
"""

import hmac
from collections.abc import Collection

import grpc
from millrace_common.deployment_secret import derive
from millrace_common.reasons import Reason
from millrace_common.tls_config import Peer, Tls

from millrace_rpc.errors import MillraceError
from millrace_rpc.server import Interceptor, preceded

HEADER = "authorization"
MAY: dict[str, tuple[Peer, ...]] = {  # service, or method, to its callers; nobody calls what is not here
    "/millrace.v1.Admin": ("admin", "router"),  # operators use the router's certificate inside its pod
    "/millrace.v1.WorkerService": ("router", "admin"),
    "/millrace.v1.WorkerService/GetInfo": ("router", "admin", "worker"),
    "/millrace.v1.WorkerService/WatchLoad": ("router", "admin", "worker"),
    "/millrace.v1.PrefillService": ("router", "worker"),  # a decode worker warms up the pair
    "/millrace.v1.DecodeService": ("router", "worker"),  # likewise, of flexible workers
    "/millrace.v1.KvService": ("worker",),
}


def token(secret: bytes) -> str:
    """What a caller sends in HEADER; empty without a secret."""
    return f"Bearer {derive(secret, 'worker port').hex()}" if secret else ""


class Access(Interceptor):
    def __init__(self, tls: Tls | None, secret: bytes) -> None:
        self._peers = tls.peers if tls is not None and tls.require_client_cert else None
        self._token = token(secret)

    def wrap(self, handler: grpc.RpcMethodHandler, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        sent = dict(details.invocation_metadata).get(HEADER, "")

        def check(context: grpc.aio.ServicerContext) -> None:
            names = context.auth_context().get("x509_subject_alternative_name", ())
            self.check(details.method, [name.decode(errors="replace") for name in names], str(sent))

        return preceded(handler, check)

    def check(self, method: str, names: Collection[str], sent: str) -> None:
        """`names`: of the caller's certificate; `sent`: its HEADER. Raises UNAUTHENTICATED."""
        if self._peers is not None:
            roles = MAY.get(method) or MAY.get(method.rpartition("/")[0], ())
            if not any(name in self._peers[role] for role in roles for name in names):
                wanted = " or ".join(f"tls.peers.{role}" for role in roles) or "no section of tls.peers"
                text = f"{method} is for {wanted}; the caller's certificate names {', '.join(names) or 'nobody'}"
                raise MillraceError(Reason.UNAUTHENTICATED, text)
        elif self._token and not hmac.compare_digest(sent.encode(), self._token.encode()):
            why = "has another secret than this process" if sent else "sent no token: it has no `secret`"
            raise MillraceError(Reason.UNAUTHENTICATED, f"the caller {why}; give both the same file")
