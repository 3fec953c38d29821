"""The answers of the Messages API, as the OpenAPI document describes them."""

from typing import Literal, NotRequired, TypedDict

from millrace_common.json_values import JsonObject


class Message(TypedDict):
    """As Anthropic describes it, and `system_fingerprint` and `ignored` as of chat. `content`: blocks of type thinking,
    text and tool_use.
    """

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    system_fingerprint: str | None
    ignored: NotRequired[dict[str, str]]
    content: list[JsonObject]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    usage: JsonObject


class MessageTokens(TypedDict):
    input_tokens: int


class MessageErrorFacts(TypedDict):
    """`details`: of a refused `thread`."""

    type: str
    message: str
    details: NotRequired[JsonObject]


class MessageError(TypedDict):
    type: Literal["error"]
    error: MessageErrorFacts
    request_id: str | None
