"""Requests of the OpenAI API, and how they become an `Ask`. Types only: every limit is in flow/validate.py.

Null means absent. Fields that clients send by habit and that cannot change the text are ignored (`IGNORED`); any
other unknown field is refused, because ignoring it would silently give another answer than the client asked for.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from millrace.v1 import common_pb2
from millrace_common.grammar import text as grammar_text
from millrace_common.reasons import Reason
from millrace_common.sampling_limits import NUMBERS
from millrace_rpc.errors import MillraceError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from millrace_router.flow.ask import Ask, Chat, Prompt
from millrace_router.flow.validate import invalid

T = TypeVar("T")
Items = Annotated[list[T], Field(fail_fast=True)]  # only the first mistake is reported: a body may hold a million
MISTAKES = 100  # of a request; larger ones are not checked in detail


DEEP = ("messages", "output_config", "response_format", "text", "tools")  # fields that hold JSON values of any form


class Nullable(BaseModel):
    """Clients send objects of their own types back with null in every field that the answer did not have."""

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        if isinstance(values, dict) and None in values.values():
            return {name: value for name, value in values.items() if value is not None}
        return values


class Strict(Nullable):
    """Of a whole request some fields are ignored, and some are refused with a reason."""

    IGNORED: ClassVar[frozenset[str]] = frozenset(
        {"metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"}
        | {"service_tier", "store", "verbosity"}
    )
    UNSUPPORTED: ClassVar[Mapping[str, str]] = {  # by name, with the reason or what to do instead
        "audio": "only text is generated",
        "echo": "the prompt is not part of the answer",
        "function_call": "use tool_choice",
        "functions": "use tools",
        "moderation": "nothing is moderated",
        "prediction": "nothing is made faster by it",
        "suffix": "the model continues a text, it does not fill one in",
        "web_search_options": "the model has no network",
    }

    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(Strict, frozen=True):  # pydantic copies a default that may change with every request
    include_usage: bool = False
    continuous_usage_stats: bool = False  # an extension: every chunk has the usage so far
    include_obfuscation: Literal[False] = False


class JsonSchema(Strict):
    """`schema` absent: any JSON object. `strict` changes nothing: the output always satisfies the schema."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict, frozen=True):
    """`regex` is an extension: the pattern that the whole output matches."""

    type: Literal["text", "json_object", "json_schema", "regex"] = "text"
    json_schema: JsonSchema | None = None
    regex: str | None = None

    def grammar(self) -> common_pb2.Grammar | None:
        for field in ("json_schema", "regex"):
            if (getattr(self, field) is not None) is not (self.type == field):
                needed = "is required" if self.type == field else "has no meaning"
                raise invalid("response_format", f".{field} {needed} with type {self.type}")
        if self.type == "text":
            return None
        if self.type == "regex":
            return common_pb2.Grammar(regex=self.regex or "")
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        return common_pb2.Grammar(json_schema=json.dumps({"type": "object"} if schema is None else schema))

    def shown(self) -> dict[str, Any] | bool | None:
        """What templates that speak of the answer's form show: the schema, or the words for any JSON object."""
        if self.type not in ("json_object", "json_schema"):
            return None
        schema = self.json_schema.schema_ if self.json_schema is not None else None
        return {"type": "json_object"} if schema is None else schema


class Common(Strict):
    """The fields of both endpoints. The fields after `response_format` are extensions."""

    model: str = ""  # empty: the served one
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stop: str | Items[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    max_tokens: int | None = None
    stream: bool = False
    user: str = ""  # the session, unless the header x-session-id names one
    stream_options: StreamOptions = StreamOptions()
    response_format: ResponseFormat = ResponseFormat()
    guided_regex: str | None = None  # short for response_format of type regex
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: Items[int] = []
    keep_special_tokens: bool = False
    priority: int = 0
    timeout_s: float | None = None  # the deadline that gRPC clients set on the call

    def as_ask(self, prompt: Prompt, request_id: str, max_tokens: int | None, logprobs: int | None) -> Ask:
        given = {"max_tokens": max_tokens, "logprobs": logprobs}
        numbers = {name: getattr(self, name) for name in NUMBERS if name not in given} | given
        grammar, grammar_param = self._grammar()
        return Ask(
            model=self.model,
            prompt=prompt,
            numbers={name: value for name, value in numbers.items() if value is not None},
            logit_bias={_token_id(key): value for key, value in self.logit_bias.items()},
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            grammar=grammar,
            grammar_param=grammar_param,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            n=self.n,
            priority=self.priority,
            request_id=request_id,
            session_id=self.user,
            message=isinstance(prompt, Chat),
            keep_special_tokens=self.keep_special_tokens,
            timeout_s=self.timeout_s,
        )

    def _grammar(self) -> tuple[common_pb2.Grammar | None, str]:
        grammar = self.response_format.grammar()
        if self.guided_regex is None:
            return grammar, "response_format"
        if grammar is not None:
            raise invalid("guided_regex", "cannot be combined with response_format")
        return common_pb2.Grammar(regex=self.guided_regex), "guided_regex"


class CompletionRequest(Common):
    prompt: str | Items[int] | Items[str]
    logprobs: int | None = None
    best_of: Literal[1] = 1

    def ask(self, request_id: str) -> Ask:
        return self.as_ask(self._one_prompt(), request_id, self.max_tokens, self.logprobs)

    def _one_prompt(self) -> str | list[int]:
        if isinstance(self.prompt, str):
            return self.prompt
        texts = [item for item in self.prompt if isinstance(item, str)]
        if len(texts) > 1:
            raise invalid("prompt", f"must be one prompt, not a list of {len(texts)}")
        return texts[0] if texts else [item for item in self.prompt if isinstance(item, int)]


R = TypeVar("R", bound=Strict)


def parse(model: type[R], body: bytes) -> R:
    """Raises INVALID_ARGUMENT for anything but a well-formed request of this type."""
    try:
        values: Any = json.loads(body.decode())
    except UnicodeDecodeError as error:
        raise MillraceError(Reason.INVALID_ARGUMENT, f"the body is not valid UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise MillraceError(Reason.INVALID_ARGUMENT, f"the body is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise MillraceError(Reason.INVALID_ARGUMENT, "the body must be a JSON object")
    if isinstance(values.get("prompt"), list) and len(values["prompt"]) == 1 and isinstance(values["prompt"][0], list):
        values["prompt"] = values["prompt"][0]
    for name, why in model.UNSUPPORTED.items():
        if values.pop(name, None):
            raise invalid(name, f"is not supported: {why}")
    for name in DEEP:
        if grammar_text.deeper_than(values.get(name), 2 * grammar_text.MAX_DEPTH):
            raise invalid(name, f"is nested more than {2 * grammar_text.MAX_DEPTH} deep")
    given = {name: value for name, value in values.items() if value is not None and name not in model.IGNORED}
    try:
        request = model.model_validate(given)
    except ValidationError as error:
        raise _explain(error) from error
    if b"\\ud" in body or b"\\uD" in body:  # JSON can spell lone surrogates, which no UTF-8 text contains
        for name, value in given.items():
            try:
                json.dumps(value, ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise invalid(name, "is not valid UTF-8") from None
    return request


def _explain(error: ValidationError) -> MillraceError:
    if error.error_count() > MISTAKES:
        return MillraceError(Reason.INVALID_ARGUMENT, f"{error.error_count()} fields are unknown or not of their type")
    problems = error.errors()
    problem = next((problem for problem in problems if problem["type"] == "literal_error"), problems[0])  # says more
    param = str(problem["loc"][0])
    where = ".".join(str(part) for part in problem["loc"] if not str(part).endswith("]"))
    text = {
        "extra_forbidden": f"unknown or unsupported field {where}",
        "missing": f"{where} is required",
    }.get(problem["type"], f"{where}: {problem['msg']}")
    return MillraceError(Reason.INVALID_ARGUMENT, text, param=param)


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise invalid("logit_bias", f": {key!r} is not a token id") from None
