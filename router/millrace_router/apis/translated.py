"""Requests of the other APIs: a conversation in the form of chat, and few of its further fields."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from millrace_rpc.errors import Path
from pydantic import ConfigDict, Field

from millrace_router.apis.openai.chat import Arguments
from millrace_router.apis.openai.types import REQUEST_ID, ApiRequest, JsonSchema, present
from millrace_router.apis.parsing import Known
from millrace_router.flow.ask import Ask, Chat


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

    @abstractmethod
    def as_chat(self) -> Chat: ...

    def as_ask(
        self,
        request_id: str,
        origins: dict[Path, Path],
        schema: JsonSchema | None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        session_id: str | None = None,
    ) -> Ask:
        """`origins`: the fields of this API from which those of an `Ask` come, where their names differ."""
        numbers = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "seed")}
        return Ask(
            model=self.model,
            prompt=self.as_chat(),
            numbers=present(numbers | {"max_tokens": max_tokens}),
            grammar=None if schema is None else schema.grammar(),
            stop=stop,
            message=True,
            priority=self.priority,
            request_id=request_id,
            session_id=session_id or "",
            timeout_s=self.timeout_s,
            origins={**origins, ("request_id",): REQUEST_ID},
        )
