"""Requests of the other APIs, which become a request of chat: template, tools, grammar and limits are the same."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from millrace_rpc.errors import Path
from pydantic import ConfigDict, Field

from millrace_router.flow.validate import invalid
from millrace_router.openai.chat import MAX_ARGUMENTS, Arguments, ChatRequest
from millrace_router.openai.parsing import Known
from millrace_router.openai.types import ApiRequest


class Lenient(Known):
    """What clients send back as it came: its further fields do not change what the model reads."""

    model_config = ConfigDict(extra="ignore", strict=True)


class Translated(ApiRequest):
    """`top_k`, `seed`, `priority`, `timeout_s` and `chat_template_kwargs` mean what they mean for chat."""

    model: str = ""
    """Empty or absent: the served one. Another name: 404."""
    temperature: float | None = None
    top_p: float | None = None
    stream: bool = False
    """The answer comes as server-sent events."""
    top_k: int | None = None
    seed: int | None = None
    """Beyond the vendor: drawn when absent."""
    priority: int = 0
    """Beyond the vendor: the place in the queue, higher first."""
    timeout_s: float | None = None
    """Beyond the vendor: the deadline in seconds."""
    chat_template_kwargs: Arguments = Field({})
    """Beyond the vendor: arguments of the template, such as `thinking` of V3.1 and V3.2. Scalars."""

    @property
    def ignored(self) -> dict[str, str]:
        """Parts that chat has no place for, and their types; tools not among them."""
        return {}

    @abstractmethod
    def conversation(self) -> dict[str, Any]:
        """As fields of chat."""

    @abstractmethod
    def origins(self) -> dict[Path, Path]:
        """The fields from which those of `conversation` come, where their names differ, as for `FieldError.renamed`."""

    def as_chat(self) -> ChatRequest:
        return ChatRequest.model_validate(self.conversation())

    def shared(self, thinking: bool | None) -> dict[str, Any]:
        """The fields here as chat's. `thinking`: what was asked for, None for the template's default."""
        kwargs = ({} if thinking is None else {"thinking": thinking}) | self.chat_template_kwargs
        if len(kwargs) > MAX_ARGUMENTS:
            raise invalid("chat_template_kwargs", f"must have at most {MAX_ARGUMENTS} entries with ", ("thinking",))
        names = ("model", "temperature", "top_p", "top_k", "seed", "priority", "timeout_s")
        return {name: getattr(self, name) for name in names} | {"chat_template_kwargs": kwargs}
