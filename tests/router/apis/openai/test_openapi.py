"""The published OpenAPI document, and requests that are made up from it."""

import asyncio
import json
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from millrace_router.apis import openapi
from millrace_router.apis.anthropic.http import POSTS
from millrace_rpc.errors import TABLE
from millrace_testing import HANG_S
from router.harness import Cluster
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 2  # of each operation and mode: drawing one takes long
HELLO = [{"role": "user", "content": "hello"}]


def test_the_document_is_whole() -> None:
    document = openapi.document(POSTS)
    text = json.dumps(document)
    named = {part.split('"')[0] for part in text.split('"#/components/schemas/')[1:]}
    schemas = document["components"]["schemas"]
    assert named <= set(schemas)
    for schema in schemas.values():
        Draft202012Validator.check_schema(schema)
    posts = {path: item["post"]["responses"] for path, item in document["paths"].items() if "post" in item}
    assert all(set(responses) == {"200", *(str(row.http) for row in TABLE.values())} for responses in posts.values())
    assert "usage" not in schemas["ChatChunk"]["required"] and "id" in schemas["ChatChunk"]["required"]
    assert schemas["ChatRequest"]["additionalProperties"] is False and "store" in schemas["ChatRequest"]["properties"]


async def test_chunks_are_as_published(pair: Cluster) -> None:
    document = (await pair.http.get("/openapi.json")).json()
    assert document == msgspec.json.decode(msgspec.json.encode(openapi.document(POSTS)))
    for path, prompt, name in (
        ("/v1/chat/completions", {"messages": HELLO}, "ChatChunk"),
        ("/v1/completions", {"prompt": "x"}, "TextAnswer"),
    ):
        schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
        options = {"max_tokens": 3, "stream": True, "stream_options": {"include_usage": True}, "n": 2}
        answer = await pair.http.post(path, json=prompt | options | {"logprobs": True if "chat" in path else 2})
        events = [line.removeprefix("data: ") for line in answer.text.split("\n") if line]
        assert events.pop() == "[DONE]" and len(events) > 3
        for event in events:
            Draft202012Validator(schema).validate(json.loads(event))


@pytest.mark.parametrize("mode", list(GenerationMode))
async def test_no_request_breaks_what_is_published(pair: Cluster, mode: GenerationMode) -> None:
    """No status, content type or body that the document does not name, and never a 5xx."""
    schema = await asyncio.to_thread(schemathesis.openapi.from_url, f"{pair.url}/openapi.json")
    for operation in (result.ok() for result in schema.get_all_operations()):
        if mode is GenerationMode.POSITIVE or operation.body:  # nothing can be wrong with a GET
            await asyncio.to_thread(fuzz, operation, mode)
    await pair.quiet()


def fuzz(operation: Any, mode: GenerationMode) -> None:
    few = st.integers(1, 8)  # the fake workers answer up to as many tokens
    known = {"max_tokens": few, "max_output_tokens": few, "timeout_s": st.none(), "stream": st.booleans()}
    about = (openapi.POSTS | POSTS).get(operation.path)
    known = {name: value for name, value in known.items() if about is not None and name in about.request.model_fields}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode), short=st.fixed_dictionaries(known))
    def run(case: Any, short: dict[str, Any]) -> None:
        if isinstance(case.body, dict):
            case.body |= short
        case.call_and_validate(checks=CHECKS, timeout=HANG_S)

    run()
