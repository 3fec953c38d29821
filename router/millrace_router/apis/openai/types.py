"""Requests of the OpenAI API, and how they become an `Ask`. Types only: every limit is in flow/validate.py."""

import contextlib
import json
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar, Literal, Self, TypeVar, cast

from millrace.v1 import common_pb2
from millrace_common.grammar import text as grammar_text
from millrace_common.json_values import Json, JsonObject
from millrace_common.sampling_limits import MAX_LOGIT_BIAS, NUMBERS
from millrace_rpc.errors import FieldError, Path
from pydantic import (
    ConfigDict,
    Discriminator,
    Field,
    PrivateAttr,
    Tag,
    ValidationError,
    ValidationInfo,
    WrapValidator,
    model_validator,
)

from millrace_router.apis.parsing import (
    HABITS,
    Boolean,
    Items,
    Known,
    Object,
    OneOf,
    String,
    at_most,
    chosen,
    first_mistake,
    json_object,
    kind,
)
from millrace_router.flow.ask import Ask, Chat, Prompt

T = TypeVar("T")
KEPT_S = {None: 0, "in_memory": 300, "in-memory": 300, "30m": 1800, "12h": 12 * 3600, "24h": 24 * 3600}
REQUEST_ID: Path = ("x-request-id",)  # the header
DEEP = ("input", "messages", "output_config", "response_format", "text", "tools")  # fields that hold any JSON values


class Strict(Known):
    """A field that is neither a type's own nor ignored is refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Asking(Strict):
    @abstractmethod
    def ask(self, request_id: str) -> Ask: ...


class ApiRequest(Asking):
    """A whole request to generate: the fields of every API."""

    IGNORED: ClassVar = HABITS | frozenset({"metadata", "safety_identifier", "service_tier", "store", "verbosity"})
    UNSUPPORTED: ClassVar = {
        "audio": "only text is generated",
        "echo": "the prompt is not part of the answer",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "moderation": "nothing is moderated",
        "prediction": "nothing is made faster by it",
        "suffix": "the model continues a text, it does not fill one in",
        "web_search_options": "the model has no network",
    }

    model: str = ""
    """Empty or absent: the served one. Another name: 404."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    """Beyond OpenAI."""
    seed: int | None = None
    """Drawn when absent."""
    stream: bool = False
    """The answer comes as server-sent events. An error after the first one is an event."""
    priority: int = 0
    """Beyond the vendors: the place in the queue, higher first."""
    timeout_s: float | None = None
    """Beyond the vendors: the deadline in seconds, which gRPC clients set on the call. See
    [numbers](api-chat.md#numbers)."""
    _keep_s: int = PrivateAttr(0)  # the longest that a cache_control asks for

    @model_validator(mode="after")
    def _hinted(self, info: ValidationInfo) -> Self:
        self._keep_s = max(info.context or (), default=0)
        return self

    def hints(self) -> tuple[JsonObject, dict[Path, Path]]:
        """About the prompt cache: fields of an `Ask`, and their origins."""
        return {"keep_s": self._keep_s}, {}

    def as_ask(
        self,
        prompt: Prompt,
        request_id: str,
        numbers: Mapping[str, int | None],
        origins: Mapping[Path, Path],
        **more: Json,  # fields of an Ask, as they are
    ) -> Ask:
        """`numbers`: those that have another name here. `origins`: the fields from which those of an `Ask` come, where
        the names differ.
        """
        hints, named = self.hints()
        values = {**{name: getattr(self, name, None) for name in NUMBERS}, **numbers}
        return Ask(
            model=self.model,
            prompt=prompt,
            numbers=present(values),
            message=isinstance(prompt, Chat),
            priority=self.priority,
            request_id=request_id,
            timeout_s=self.timeout_s,
            origins={**origins, **named, ("request_id",): REQUEST_ID},
            **hints,
            **more,
        )


class Lenient(Known):
    """What clients send back as it came: its further fields do not change what the model reads."""

    model_config = ConfigDict(extra="ignore", strict=True)


class CacheOptions(Lenient, frozen=True):
    ttl: Literal["30m", "12h"] | None = None
    """Keeps the prompt's cached pages so long."""


class VendorRequest(ApiRequest):
    """The fields of all endpoints of OpenAI that name the session, and hints about caches."""

    user: str = ""
    """The session, unless `prompt_cache_key` or the header x-session-id names one. At most 512 characters."""
    prompt_cache_key: str = ""
    """The session, unless the header x-session-id names one. At most 512 characters."""
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    """Keeps the prompt's cached pages: `in_memory` for five minutes."""
    prompt_cache_options: CacheOptions = CacheOptions()

    def hints(self) -> tuple[JsonObject, dict[Path, Path]]:
        session = "prompt_cache_key" if self.prompt_cache_key else "user"
        keep_s = max(self._keep_s, KEPT_S[self.prompt_cache_retention], KEPT_S[self.prompt_cache_options.ttl])
        return {"session_id": getattr(self, session), "keep_s": keep_s}, {("session_id",): (session,)}


class Obfuscation(Strict, frozen=True):  # pydantic copies a default that may change with every request
    UNSUPPORTED: ClassVar = {"include_obfuscation": "nothing is obfuscated"}


class StreamOptions(Obfuscation, frozen=True):
    include_usage: bool = False
    """A last chunk has the usage."""
    continuous_usage_stats: bool = False
    """Beyond OpenAI, with `include_usage`: every chunk has the usage so far."""


class JsonSchema(Strict):
    name: str = ""
    """Changes nothing."""
    description: str | None = None
    """Changes nothing."""
    schema_: OneOf[Object | Boolean] | None = Field(None, alias="schema")
    """Absent: any JSON object. At most 64 KB and 64 levels."""
    strict: bool | None = None
    """Changes nothing: the output always satisfies the schema."""

    def grammar(self) -> common_pb2.Grammar:
        return common_pb2.Grammar(json_schema=json.dumps({"type": "object"} if self.schema_ is None else self.schema_))

    def shown(self) -> JsonObject | bool:
        """For templates that speak of the answer's form: the schema, or the words for any JSON object."""
        return {"type": "json_object"} if self.schema_ is None else self.schema_


ANY_OBJECT = JsonSchema()


class SchemaFormat(JsonSchema):
    type: Literal["json_schema"]

    @property
    def schema_of(self) -> JsonSchema:
        return self


class PlainFormat(Strict, frozen=True):
    type: Literal["text", "json_object"]

    @property
    def schema_of(self) -> JsonSchema | None:
        return ANY_OBJECT if self.type == "json_object" else None


class ResponseFormat(Strict, frozen=True):
    type: Literal["text", "json_object", "json_schema", "regex"] = "text"
    """The output follows the grammar. `regex` is beyond OpenAI."""
    json_schema: JsonSchema | None = None
    """With type `json_schema`. V3.2 sees the schema in its prompt."""
    regex: str | None = None
    """With type `regex`: the pattern of the whole output, at most 4 KB."""

    @property
    def schema_of(self) -> JsonSchema | None:
        """What the output has to satisfy; None: no schema."""
        return ANY_OBJECT if self.type == "json_object" else self.json_schema if self.type == "json_schema" else None

    def grammar(self) -> common_pb2.Grammar | None:
        for field in ("json_schema", "regex"):
            if (getattr(self, field) is not None) is not (self.type == field):
                needed = "is required" if self.type == field else "has no meaning"
                raise FieldError(("response_format", field), f"{needed} with type {self.type}")
        if self.type == "regex":
            return common_pb2.Grammar(regex=self.regex or "")
        return None if self.schema_of is None else self.schema_of.grammar()


class Common(VendorRequest):
    """The fields of both endpoints. The fields after `response_format` are extensions."""

    n: int = 1
    """1 to 16. Continuation i uses seed + i."""
    stop: OneOf[String | Items[str]] | None = None
    """At most 16 of 1 to 256 characters. The content is cut before the first complete one. Reasoning,
    tool calls and the marks around them have none, and none goes across them; in completions all of the text is
    content. Tokens count, and have logprobs, up to the one with which the cut is certain.
    """
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], at_most(MAX_LOGIT_BIAS)] = Field({})
    """By token id, each from -100 to 100. At most 1,024 entries."""
    max_tokens: int | None = None
    """Absent: the rest of the context. With the prompt within the context."""
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat()
    """Not with `ignore_eos` or `min_tokens`."""
    guided_regex: str | None = None
    """Beyond OpenAI: short for the `regex` format."""
    min_p: float | None = None
    """Beyond OpenAI."""
    repetition_penalty: float | None = None
    """Beyond OpenAI."""
    min_tokens: int | None = None
    """Beyond OpenAI. At most `max_tokens`."""
    ignore_eos: bool = False
    """Beyond OpenAI: the end token does not end the output."""
    stop_token_ids: Items[int] = Field([])
    """Beyond OpenAI. At most 64 token ids that end the output."""
    keep_special_tokens: bool = False
    """Beyond OpenAI: special tokens stay in the text."""

    def ask_for(self, prompt: Prompt, request_id: str, max_tokens: int | None, logprobs: int | None) -> Ask:
        grammar, origin = self._grammar()
        origins: dict[Path, Path] = {("grammar",): (origin,)}
        if isinstance(self.stop, str):
            origins["stop", 0] = ("stop",)
        return self.as_ask(
            prompt,
            request_id,
            {"max_tokens": max_tokens, "logprobs": logprobs},
            origins,
            logit_bias={_token_id(key): value for key, value in self.logit_bias.items()},
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            grammar=grammar,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            n=self.n,
            keep_special_tokens=self.keep_special_tokens,
        )

    def _grammar(self) -> tuple[common_pb2.Grammar | None, str]:
        grammar = self.response_format.grammar()
        if self.guided_regex is None:
            return grammar, "response_format"
        if grammar is not None:
            raise FieldError("guided_regex", "cannot be combined with ", ("response_format",))
        return common_pb2.Grammar(regex=self.guided_regex), "guided_regex"


def _kind_of_prompt(value: Json) -> str:
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, list):
        return "an array of arrays"
    return "an array of strings" if isinstance(first, str) else kind(value)


Texts = Annotated[list[str], Field(fail_fast=True), Tag("an array of strings")]
Prompts = Annotated[list[Items[int]], Field(fail_fast=True), Tag("an array of arrays")]


class CompletionRequest(Common):
    prompt: Annotated[String | Items[int] | Texts | Prompts, Discriminator(_kind_of_prompt), WrapValidator(chosen)]
    """A text, token ids, or an array with one of either."""
    logprobs: int | None = None
    r"""Of the distribution before all changes to it. A part of a character is `bytes:\xe2\x80`; `text_offset` is
    where its character begins, in the text before a cut. The sampled token is among the alternatives. An alternative
    whose text another one has is `token_id:5`.
    """
    best_of: int = Field(1, ge=1, le=1)
    """Ask for `n` and choose."""

    def ask(self, request_id: str) -> Ask:
        prompt, origin = self._one_prompt()
        ask = self.ask_for(prompt, request_id, self.max_tokens, self.logprobs)
        return replace(ask, origins={**ask.origins, ("prompt",): origin})

    def _one_prompt(self) -> tuple[str | list[int], Path]:
        if isinstance(self.prompt, str):
            return self.prompt, ("prompt",)
        several = [item for item in self.prompt if not isinstance(item, int)]
        if len(several) > 1:
            raise FieldError("prompt", f"must be one prompt, not a list of {len(several)}")
        return (several[0], ("prompt", 0)) if several else (cast("list[int]", self.prompt), ("prompt",))


R = TypeVar("R", bound=Strict)


def present(values: Mapping[str, T | None]) -> dict[str, T]:
    return {name: value for name, value in values.items() if value is not None}


def parse(model: type[R], body: bytes) -> R:
    """Raises INVALID_ARGUMENT for anything but a well-formed request of this type."""
    values = json_object(body)
    for name in DEEP:
        if grammar_text.deeper_than(values.get(name), 2 * grammar_text.MAX_DEPTH):
            raise FieldError(name, f"is nested more than {2 * grammar_text.MAX_DEPTH} deep")
    try:
        return model.model_validate(values, context=[])
    except ValidationError as error:
        raise FieldError(*first_mistake(error)) from error


def _token_id(key: str) -> int:
    with contextlib.suppress(ValueError):
        if str(token := int(key)) == key:  # one spelling only: of two, one would be dropped
            return token
    raise FieldError(("logit_bias", key), "is not a token id")
