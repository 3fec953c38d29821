"""Texts, streams, tools and schemas with LiteLLM's providers, against the router at the URL in argv[1]."""

import sys
from typing import Any

import litellm
from pydantic import BaseModel


class City(BaseModel):
    name: str


URL = sys.argv[1]
SCHEMA = City.model_json_schema()
TOOLS = [{"type": "function", "function": {"name": "City", "description": "Of a name", "parameters": SCHEMA}}]
HELLO = [{"role": "user", "content": "A city?"}]
litellm.telemetry = False


def ask(provider: str, messages: list[Any], stream: bool = False, **more: Any) -> Any:
    base = URL if provider == "anthropic" else f"{URL}/v1"
    answer = litellm.completion(
        model=f"{provider}/tiny",
        api_base=base,
        api_key="none",
        messages=messages,
        max_tokens=200,
        stream=stream,
        **more,
    )
    return litellm.stream_chunk_builder(list(answer), messages=messages) if stream else answer


for provider in ("openai", "hosted_vllm", "anthropic"):
    for stream in (False, True):
        answer = ask(provider, [{"role": "system", "content": "Be brief."}, *HELLO], stream, temperature=0.5)
        assert answer.choices[0].message.content == "Hello." and answer.choices[0].finish_reason == "stop"
        answer = ask(provider, HELLO, stream, tools=TOOLS, tool_choice="auto")
        message = answer.choices[0].message
        (call,) = message.tool_calls
        assert (call.function.name, call.function.arguments) == ("City", '{"name": "Oslo"}')
        assert answer.choices[0].finish_reason == "tool_calls"
        result = {"role": "tool", "tool_call_id": call.id, "content": "found"}
        answer = ask(provider, [*HELLO, message.model_dump(), result], stream, tools=TOOLS)
        assert answer.choices[0].message.content == "Hello."
    answer = ask(provider, HELLO, response_format=City)
    assert City.model_validate_json(answer.choices[0].message.content) == City(name="Oslo")
answer = litellm.responses(model="openai/tiny", api_base=f"{URL}/v1", api_key="none", input="A city?")
assert answer.output[0].content[0].text == "Hello."
