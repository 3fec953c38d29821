"""The answer objects of the OpenAI API, as the code builds them and the OpenAPI document describes them."""

from typing import Literal, NotRequired, TypedDict

from millrace_common.json_values import JsonObject

FinishReason = Literal["stop", "length", "tool_calls"]


class Alternative(TypedDict):
    """`bytes` of the token, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(Alternative):
    top_logprobs: list[Alternative]


class ChatLogprobs(TypedDict):
    content: list[TokenEntry]
    refusal: None


class CompletionLogprobs(TypedDict):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CallChunk(TypedDict):
    """`id`, `type` and `function.name` are on a call's first chunk."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class FunctionCall(TypedDict):
    name: str
    arguments: str


class ToolCallObject(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatDelta(TypedDict, total=False):
    role: Literal["assistant"]
    content: str
    reasoning_content: str
    tool_calls: list[CallChunk]


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[ToolCallObject]]


class PromptDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class CompletionDetails(TypedDict):
    """The predictions are the workers' drafts; there when they drafted."""

    reasoning_tokens: int
    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Choice(TypedDict):
    index: int
    finish_reason: FinishReason | None


class ChatChoice(Choice):
    logprobs: ChatLogprobs | None
    message: ChatMessage


class ChatChunkChoice(Choice):
    logprobs: ChatLogprobs | None
    delta: ChatDelta


class TextChoice(Choice):
    logprobs: CompletionLogprobs | None
    text: str


class Envelope(TypedDict):
    """`system_fingerprint` is the version of the weights. `ignored`: parts of the request that were left out, by path,
    and their types; in a stream on the first chunk of each choice.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str | None
    ignored: NotRequired[dict[str, str]]


class ChatAnswer(Envelope):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage


class ChatChunk(Envelope):
    """`usage` is there when it was asked for: null, and on the last chunk, which has no choices, the numbers."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: NotRequired[Usage | None]


class TextAnswer(Envelope):
    """The answer and the chunks of its stream, which have `usage` as a chat's."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]


class Response(TypedDict):
    """As OpenAI describes it, and `system_fingerprint` and `ignored` as of chat. `output`: items of type reasoning,
    message and function_call. Nothing is stored.
    """

    id: str
    object: Literal["response"]
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    model: str
    system_fingerprint: str | None
    ignored: NotRequired[dict[str, str]]
    output: list[JsonObject]
    usage: JsonObject | None
    error: dict[str, str] | None
    store: Literal[False]


class NamedEvent(TypedDict):
    """Of a stream, as the API's vendor describes it."""

    type: str


class ModelObject(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelObject]


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]


class Text(TypedDict):
    prompt: str


class ErrorFacts(TypedDict):
    """`code` is a reason of the error table in lower case, or OpenAI's word; `param` the field, if one was wrong."""

    message: str
    type: str
    param: str | None
    code: str


class Error(TypedDict):
    error: ErrorFacts
