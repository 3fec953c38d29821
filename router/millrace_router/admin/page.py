"""`/` of the operators' HTTP port: a page for a browser, made of the files in page/. It reads /workers.

Its policy lets the browser ask this port and the public HTTP port of the same host, and nobody else. Pages of other
sites are refused as on every path (browser_guard.py).
"""

import re
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace_router.admin import browser_guard

FOLDER = Path(__file__).with_name("page")
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'{public}; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
SOURCE = re.compile(r"[A-Za-z0-9.-]+")  # a host that a policy can name, which IPv6 addresses are not


@dataclass
class PublicHttp:
    tls: bool
    port: int = 0  # once it is bound


def routes(names: Collection[str], public: PublicHttp) -> list[Route]:
    """`names` as in admin_http.py."""
    files = sorted(FOLDER.iterdir())
    return [Route("/" if it.name == "index.html" else f"/{it.name}", _file(it, names, public)) for it in files]


def _file(path: Path, names: Collection[str], public: PublicHttp) -> Callable[[Request], Awaitable[Response]]:
    content, kind = path.read_bytes(), TYPES[path.suffix]

    async def endpoint(request: Request) -> Response:
        browser_guard.check(request.method, request.headers, names)
        return Response(content, headers=_headers(request.url.hostname or "", public), media_type=kind)

    return endpoint


def _headers(host: str, public: PublicHttp) -> dict[str, str]:
    source = f" http{'s' if public.tls else ''}://{host}:{public.port}" if SOURCE.fullmatch(host) else ""
    return {
        "content-security-policy": POLICY.format(public=source),
        "cache-control": "no-cache",
        "referrer-policy": "no-referrer",
        "x-content-type-options": "nosniff",
    }
