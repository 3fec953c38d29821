"""The OpenAPI document of the public HTTP port, made from the types of requests and answers.

It is fuzzed against a running router (tests/router/apis/openai/test_openapi.py), so that it stays true.
"""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import msgspec
from millrace_common.json_values import JsonObject
from millrace_rpc.errors import TABLE
from pydantic.json_schema import models_json_schema

from millrace_router.apis.openai import objects
from millrace_router.apis.openai.chat import ChatRequest
from millrace_router.apis.openai.responses_request import ResponsesRequest
from millrace_router.apis.openai.tokens import DetokenizeRequest, TokenizeRequest
from millrace_router.apis.openai.types import CompletionRequest, Strict

REF = "#/components/schemas/"
REQUEST_ID = {
    "name": "x-request-id", "in": "header", "required": False,
    "description": "Appears in logs, traces and the answer's id.",
    "schema": {"type": "string", "maxLength": 128},
}  # fmt: skip
MODEL = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}


class Post(NamedTuple):
    """The types of a request, of its answer, of a chunk of its stream, and of its errors."""

    summary: str
    request: type[Strict]
    answer: type
    chunk: type | None = None
    error: type = objects.Error


POSTS = {
    "/v1/chat/completions": Post("Answer a conversation", ChatRequest, objects.ChatAnswer, objects.ChatChunk),
    "/v1/completions": Post("Continue a text", CompletionRequest, objects.TextAnswer, objects.TextAnswer),
    "/v1/responses": Post("Answer a conversation of items", ResponsesRequest, objects.Response, objects.NamedEvent),
    "/tokenize": Post("Token ids of a prompt", TokenizeRequest, objects.Tokens),
    "/detokenize": Post("Text of token ids", DetokenizeRequest, objects.Text),
}
GETS = {
    "/v1/models": ("The served model, under all its names", objects.ModelList),
    "/v1/models/{model}": ("The served model, if this is a name of it", objects.ModelObject),
}


def document(more: Mapping[str, Post]) -> JsonObject:
    """OpenAPI 3.2, as JSON values. `more`: the posts of other APIs, by path."""
    paths: JsonObject = {}
    posts = {**POSTS, **more}
    for path, about in posts.items():
        body = {"required": True, "content": {"application/json": {"schema": _ref(about.request)}}}
        post = {"summary": about.summary, "requestBody": body, "responses": _responses(about)}
        paths[path] = {"post": post | ({"parameters": [REQUEST_ID]} if about.chunk else {})}
    for path, (summary, answer) in GETS.items():
        get = {"summary": summary, "responses": _responses(Post(summary, Strict, answer))}
        paths[path] = {"get": get | ({"parameters": [MODEL]} if "{model}" in path else {})}
    return {
        "openapi": "3.2.0",
        "info": {"title": "Millrace", "version": "1", "description": "The HTTP APIs of a Millrace router."},
        "paths": paths,
        "components": {
            "schemas": _schemas(posts.values()),
            "securitySchemes": {
                "key": {"type": "http", "scheme": "bearer", "description": "If the router has keys."},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same key."},
            },
        },
        "security": [{}, {"key": []}, {"header": []}],
    }


def _responses(about: Post) -> JsonObject:
    content: JsonObject = {"application/json": {"schema": _ref(about.answer)}}
    if about.chunk is not None:
        said = {"anyOf": [_ref(about.chunk), _ref(about.error)]}
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": said}
        event = {"type": "object", "properties": {"data": {"anyOf": [{"const": "[DONE]"}, data]}}, "required": ["data"]}
        content["text/event-stream"] = {"itemSchema": event}
    responses: JsonObject = {"200": {"description": "OK", "content": content}}
    for status in sorted({row.http for row in TABLE.values()}):
        reasons = ", ".join(reason.lower() for reason, row in TABLE.items() if row.http == status)
        error = {"description": reasons, "content": {"application/json": {"schema": _ref(about.error)}}}
        responses[str(status)] = error
    return responses


def _schemas(posts: Collection[Post]) -> JsonObject:
    requests = [post.request for post in posts]
    _, models = models_json_schema([(request, "validation") for request in requests], ref_template=REF + "{model}")
    answers = {kind for post in posts for kind in (post.answer, post.chunk, post.error) if kind is not None}
    answers |= {answer for _, answer in GETS.values()}
    _, objects_ = msgspec.json.schema_components(answers, ref_template=REF + "{name}")
    return {**models["$defs"], **objects_}


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": REF + kind.__name__}
