"""The public HTTP port: the APIs of both vendors, their description, and probes beside them."""

from collections.abc import Callable

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from millrace_router.apis import openapi
from millrace_router.apis.anthropic import http as anthropic
from millrace_router.apis.openai import http as openai
from millrace_router.flow.inference import Inference
from millrace_router.http import probes
from millrace_router.http.answers import json_answer, new_app

DOCUMENT = openapi.document(anthropic.POSTS)


def build(inference: Inference, before_scrape: Callable[[], None] | None) -> Starlette:
    """`before_scrape`: as for `probes.routes`."""

    async def described(request: Request) -> Response:
        return json_answer(DOCUMENT)

    apis = [*openai.routes(inference), *anthropic.routes(inference), *probes.routes(inference.backend, before_scrape)]
    return new_app([*apis, Route("/openapi.json", described)])
