"""Keeps web pages away from the operators' HTTP port: any page can have the browser of its reader ask that port.

A page sends forms and simple requests anywhere (CSRF), but their Origin is the page's, and JSON is no content type of
theirs. A page whose own name begins to point at this port (DNS rebinding) has that name as Host.
"""

import ipaddress
import re
import socket
from collections.abc import Collection

from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError
from starlette.datastructures import Headers

# Of names in these zones: of this host, of pods and of Services. Nobody can register one of them.
ZONES = (".localhost", ".svc", ".cluster.local")
JSON = "application/json"
_AUTHORITY = re.compile(r"(\[[^]]*\]|[^:]*)(:\d*)?")


def check(method: str, headers: Headers, names: Collection[str]) -> None:
    """Raise INVALID_ARGUMENT for what a page of another site may have sent. `names`: further ones of this host."""
    host = headers.get("host", "")
    if host and not _is_ours(host, names):
        raise _refused("host", f"must be an address, localhost, a name of this host, or a name in {', '.join(ZONES)}")
    origin = headers.get("origin")
    if origin is not None and origin.partition("://")[2] != host:
        raise _refused("origin", "must name this server, not another site")
    if method not in ("GET", "HEAD") and headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise _refused("content-type", f"must be {JSON}, also without a body")


def _is_ours(host: str, names: Collection[str]) -> bool:
    found = _AUTHORITY.fullmatch(host)
    if found is None:
        return False
    name = found[1].strip("[]").rstrip(".").lower()
    if name in ("localhost", socket.gethostname().lower(), *names) or name.endswith(ZONES):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _refused(name: str, why: str) -> MillraceError:
    return MillraceError(Reason.INVALID_ARGUMENT, f"the header {name} {why}", param=name)
