"""Requests of the other APIs, which become a request of chat: template, tools, grammar and limits are the same."""

from __future__ import annotations

import contextlib
import re
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from millrace_rpc.errors import MillraceError
from pydantic import ConfigDict, Field

from millrace_router.flow.validate import invalid
from millrace_router.openai.chat import MAX_ARGUMENTS, Arguments, ChatRequest
from millrace_router.openai.types import Nullable, Strict


class Lenient(Nullable):
    """What clients send back as it came: its further fields do not change what the model reads."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Translated(Strict):
    """`top_k`, `seed`, `priority`, `timeout_s` and `chat_template_kwargs` mean what they mean for chat."""

    NAMES: ClassVar[Mapping[str, str]]  # chat's field: this API's

    model: str = ""  # empty: the served one
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    top_k: int | None = None
    seed: int | None = None
    priority: int = 0
    timeout_s: float | None = None
    chat_template_kwargs: Arguments = Field({})

    @property
    def ignored(self) -> dict[str, str]:
        """Parts that chat has no place for, and their types; tools not among them."""
        return {}

    @abstractmethod
    def conversation(self) -> dict[str, Any]:
        """As fields of chat."""

    def as_chat(self) -> ChatRequest:
        return ChatRequest.model_validate(self.conversation())

    def shared(self, thinking: bool | None) -> dict[str, Any]:
        """The fields here as chat's. `thinking`: what was asked for, None for the template's default."""
        kwargs = ({} if thinking is None else {"thinking": thinking}) | self.chat_template_kwargs
        if len(kwargs) > MAX_ARGUMENTS:
            raise invalid("chat_template_kwargs", f"must have at most {MAX_ARGUMENTS} entries with thinking")
        names = ("model", "temperature", "top_p", "top_k", "seed", "priority", "timeout_s")
        return {name: getattr(self, name) for name in names} | {"chat_template_kwargs": kwargs}

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Errors about a field of chat name the field of this API."""
        try:
            yield
        except MillraceError as error:
            text = re.sub(rf"(^|(?<= and ))({'|'.join(self.NAMES)})\b", lambda at: self.NAMES[at[0]], error.message)
            text = text.replace("].function.name", "].name")
            param = self.NAMES.get(error.param or "", error.param)
            raise MillraceError(error.reason, text, param=param, retry_after_s=error.retry_after_s) from error
