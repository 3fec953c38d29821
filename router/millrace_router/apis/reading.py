"""One continuation of a chat as it is read, and its counts."""

import secrets

from millrace_router.flow.inference import Answer
from millrace_router.flow.stream import Delta
from millrace_router.text.call_stream import CallDelta
from millrace_router.text.message import ParsedOutput
from millrace_router.text.tokenizer import Tokenizer


class Reading:
    """`latest` has the counts so far, from the first delta on; `called`: there was a tool call."""

    def __init__(self, answer: Answer, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._thinking = answer.thinking and tokenizer.format.reasons
        self._before = 0  # tokens before the first reasoning, such as <think>
        self.latest: Delta
        self.cached_tokens = self.reasoning_tokens = 0
        self.called = False

    @property
    def version(self) -> str:
        """Of the weights; empty before the first delta."""
        latest: Delta | None = getattr(self, "latest", None)
        return "" if latest is None else latest.version

    def read(self, delta: Delta) -> ParsedOutput:
        self.latest, self.cached_tokens = delta, max(self.cached_tokens, delta.cached_tokens)
        parsed = delta.parsed
        self.called = self.called or bool(parsed.calls)
        if self._thinking or parsed.reasoning:
            ended = self._tokenizer.reasoning_end(delta.token_ids)
            self.reasoning_tokens += self._before + (len(delta.token_ids) if ended is None else ended)
            self._before, self._thinking = 0, ended is None
        elif not self.reasoning_tokens:
            self._before += len(delta.token_ids)
        return parsed


def call_id(call: CallDelta) -> str:
    """The model's own, or a new one."""
    return call.id or f"call_{secrets.token_hex(12)}"
