"""/health, /ready and /metrics: beside the public API, or on a plain port of their own."""

from collections.abc import Callable

from millrace_common.reasons import Reason
from millrace_rpc.errors import MillraceError
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace_router.flow.generation import Backend
from millrace_router.http.answers import json_answer


async def health(request: Request) -> Response:
    return json_answer({"status": "ok"})


def routes(backend: Backend, before_scrape: Callable[[], None] | None) -> list[Route]:
    """`before_scrape` updates the gauges that are not updated on change; None: no /metrics here."""

    async def ready(request: Request) -> Response:
        if backend.admission.closed:
            raise MillraceError(Reason.DRAINING, "the router is shutting down")
        if not backend.registry.ready:
            raise MillraceError(Reason.NO_WORKERS, "no pair of prefill and decode workers is ready")
        return json_answer({"status": "ready"})

    found = [Route("/health", health), Route("/ready", ready)]
    if before_scrape is not None:

        async def metrics(request: Request) -> Response:
            before_scrape()
            return Response(generate_latest(backend.metrics.registry), media_type=CONTENT_TYPE_LATEST)

        found.append(Route("/metrics", metrics))
    return found
