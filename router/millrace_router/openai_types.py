"""Requests of the OpenAI API, and how they become an `Ask`. Types only: every limit is in validate.py.

Null means absent. Fields that clients send by habit and that cannot change the text are ignored (`IGNORED`); any
other unknown field is refused, because ignoring it would silently give another answer than the client asked for.
"""

from __future__ import annotations

import json
from typing import Any, Literal, TypeVar

from millrace_rpc.errors import MillraceError, Reason
from pydantic import BaseModel, ConfigDict, ValidationError

from millrace_router.validate import Ask, Message, Prompt

IGNORED = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store"})
_SAME_NAME = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed",
    "min_tokens",
)  # fmt: skip


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class TextFormat(_Strict):
    type: Literal["text"]


class TextPart(_Strict):
    type: Literal["text"]
    text: str


class ChatTurn(_Strict):
    role: str
    content: str | list[TextPart]
    name: str | None = None

    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class _Request(_Strict):
    """What both endpoints take. The fields after `stream_options` are extensions."""

    model: str = ""  # empty: whichever is served
    temperature: float | None = None
    top_p: float | None = None
    n: int = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] = {}
    max_tokens: int | None = None
    stream: bool = False
    user: str = ""  # the session, unless the header x-session-id names one
    stream_options: StreamOptions = StreamOptions()
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    keep_special_tokens: bool = False
    priority: int = 0
    timeout_s: float | None = None  # the deadline that gRPC clients set on the call

    def _ask(self, prompt: Prompt, request_id: str, max_tokens: int | None, logprobs: int | None) -> Ask:
        numbers = {name: getattr(self, name) for name in _SAME_NAME}
        numbers |= {"max_tokens": max_tokens, "logprobs": logprobs}
        return Ask(
            model=self.model,
            prompt=prompt,
            numbers={name: value for name, value in numbers.items() if value is not None},
            logit_bias={_token_id(key): value for key, value in self.logit_bias.items()},
            stop_token_ids=self.stop_token_ids,
            ignore_eos=self.ignore_eos,
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            n=self.n,
            priority=self.priority,
            request_id=request_id,
            session_id=self.user,
            keep_special_tokens=self.keep_special_tokens,
            timeout_s=self.timeout_s,
        )


class ChatRequest(_Request):
    messages: list[ChatTurn]
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    response_format: TextFormat = TextFormat(type="text")

    def ask(self, request_id: str) -> Ask:
        if self.top_logprobs is not None and not self.logprobs:
            raise _invalid("top_logprobs", "top_logprobs needs logprobs to be true")
        messages = tuple(Message(turn.role, turn.text()) for turn in self.messages)
        max_tokens = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self._ask(messages, request_id, max_tokens, (self.top_logprobs or 0) if self.logprobs else None)


class CompletionRequest(_Request):
    prompt: str | list[int] | list[str]
    logprobs: int | None = None
    echo: Literal[False] = False

    def ask(self, request_id: str) -> Ask:
        return self._ask(self._one_prompt(), request_id, self.max_tokens, self.logprobs)

    def _one_prompt(self) -> str | list[int]:
        if isinstance(self.prompt, str):
            return self.prompt
        texts = [item for item in self.prompt if isinstance(item, str)]
        if len(texts) > 1:
            raise _invalid("prompt", f"prompt must be one prompt, not a list of {len(texts)}")
        return texts[0] if texts else [item for item in self.prompt if isinstance(item, int)]


R = TypeVar("R", bound=_Request)


def parse(model: type[R], body: bytes) -> R:
    """INVALID_ARGUMENT for anything that is not a well-formed request of this type."""
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
    try:
        return model.model_validate({k: v for k, v in values.items() if v is not None and k not in IGNORED})
    except ValidationError as error:
        raise _explain(error) from error


def _explain(error: ValidationError) -> MillraceError:
    problem = error.errors()[0]
    param = str(problem["loc"][0])
    where = ".".join(str(part) for part in problem["loc"] if not str(part).endswith("]"))
    if problem["type"] == "extra_forbidden":
        return _invalid(param, f"unknown or unsupported field {where}")
    if problem["type"] == "missing":
        return _invalid(param, f"{where} is required")
    return _invalid(param, f"{where}: {problem['msg']}")


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise _invalid("logit_bias", f"logit_bias: {key!r} is not a token id") from None


def _invalid(param: str, message: str) -> MillraceError:
    return MillraceError(Reason.INVALID_ARGUMENT, message, param=param)
