"""The OpenAPI document of the public HTTP port, made from the types of requests and answers.

It is fuzzed against a running router (tests/router/test_openapi.py), so that it stays true.
"""

from __future__ import annotations

import copy
from typing import Any

import msgspec
from millrace_rpc.errors import TABLE
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from millrace_router.openai import objects
from millrace_router.openai.chat import ChatRequest
from millrace_router.openai.tokens import DetokenizeRequest, TokenizeRequest
from millrace_router.openai.types import IGNORED, CompletionRequest

REF = "#/components/schemas/"
REQUEST_ID = {
    "name": "x-request-id", "in": "header", "required": False,
    "description": "Appears in logs, traces and the answer's id.",
    "schema": {"type": "string", "maxLength": 128},
}  # fmt: skip
POSTS: dict[str, tuple[str, type[BaseModel], type, type | None]] = {  # path: summary, request, answer, stream's chunk
    "/v1/chat/completions": ("Answer a conversation", ChatRequest, objects.ChatAnswer, objects.ChatChunk),
    "/v1/completions": ("Continue a text", CompletionRequest, objects.TextAnswer, objects.TextAnswer),
    "/tokenize": ("Token ids of a prompt", TokenizeRequest, objects.Tokens, None),
    "/detokenize": ("Text of token ids", DetokenizeRequest, objects.Text, None),
}
GETS = {"/v1/models": ("The served model", objects.ModelList)}


def document() -> dict[str, Any]:
    """OpenAPI 3.2, as JSON values."""
    paths: dict[str, Any] = {}
    for path, (summary, request, answer, chunk) in POSTS.items():
        body = {"required": True, "content": {"application/json": {"schema": _ref(request)}}}
        post = {"summary": summary, "requestBody": body, "responses": _responses(answer, chunk)}
        paths[path] = {"post": post | ({"parameters": [REQUEST_ID]} if chunk else {})}
    for path, (summary, answer) in GETS.items():
        paths[path] = {"get": {"summary": summary, "responses": _responses(answer, None)}}
    return {
        "openapi": "3.2.0",
        "info": {"title": "Millrace", "version": "1", "description": "The OpenAI API of a Millrace router."},
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer", "description": "If the router has keys."}},
        },
        "security": [{}, {"key": []}],
    }


def _responses(answer: type, chunk: type | None) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if chunk is not None:
        said = {"anyOf": [_ref(chunk), _ref(objects.Error)]}
        data = {"type": "string", "contentMediaType": "application/json", "contentSchema": said}
        either = {"anyOf": [{"const": "[DONE]"}, data]}
        event = {"type": "object", "properties": {"data": either}, "required": ["data"]}
        content["text/event-stream"] = {"itemSchema": event}
    responses: dict[str, Any] = {"200": {"description": "OK", "content": content}}
    for status in sorted({row.http for row in TABLE.values()}):
        reasons = ", ".join(reason.lower() for reason, row in TABLE.items() if row.http == status)
        error = {"description": reasons, "content": {"application/json": {"schema": _ref(objects.Error)}}}
        responses[str(status)] = error
    return responses


def _schemas() -> dict[str, Any]:
    requests = [row[1] for row in POSTS.values()]
    _, models = models_json_schema([(request, "validation") for request in requests], ref_template=REF + "{model}")
    answers = [kind for row in POSTS.values() for kind in (row[2], row[3]) if kind is not None]
    answers += [objects.ModelList, objects.Error]
    _, objects_ = msgspec.json.schema_components(answers, ref_template=REF + "{name}")
    schemas = copy.deepcopy(models["$defs"]) | objects_
    for request in requests:
        _loosen(schemas[request.__name__])
    return schemas


def _loosen(schema: dict[str, Any]) -> None:
    """Loosen a schema as types.parse reads a request: null is absent, and some fields are ignored."""
    required = schema.get("required", ())
    for name, value in schema["properties"].items():
        if name not in required and {"type": "null"} not in value.get("anyOf", ()):
            schema["properties"][name] = {"anyOf": [value, {"type": "null"}]}
    for name in sorted(IGNORED):
        schema["properties"].setdefault(name, {"description": "Ignored."})


def _ref(kind: type) -> dict[str, str]:
    return {"$ref": REF + kind.__name__}
