"""Deltas in the shapes of the OpenAI API: whole answers and stream chunks, for chat and for plain completions."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from millrace.v1 import common_pb2

from millrace_router.inference import Answer
from millrace_router.stream import Delta
from millrace_router.tokenizer import Tokenizer

FINISH: dict[int, str] = {common_pb2.FINISH_REASON_STOP: "stop", common_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(slots=True)
class Shape:
    """One answer on its way out. `delta` counts usage; the objects are plain JSON values."""

    chat: bool
    answer: Answer
    tokenizer: Tokenizer
    logprobs: bool
    created: int = field(default_factory=lambda: int(time.time()))
    completion_tokens: dict[int, int] = field(default_factory=dict)  # by continuation
    offsets: dict[int, int] = field(default_factory=dict)  # characters of a continuation's tokens so far
    cached_tokens: int = 0

    def chunk(self, delta: Delta) -> dict[str, Any]:
        self._count(delta)
        choice: dict[str, Any] = {"index": delta.index, "finish_reason": FINISH.get(delta.finish_reason)}
        choice["logprobs"] = self._logprobs(delta.index, delta.logprobs)
        if self.chat:
            role = {"role": "assistant"} if delta.first else {}
            choice["delta"] = role | ({"content": delta.text} if delta.text or delta.first else {})
        else:
            choice["text"] = delta.text
        return self._envelope([choice], ".chunk")

    def usage_chunk(self) -> dict[str, Any]:
        return self._envelope([], ".chunk") | {"usage": self._usage()}

    def whole(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        choices = []
        for index in sorted({delta.index for delta in deltas}):
            mine = [delta for delta in deltas if delta.index == index]
            for delta in mine:
                self._count(delta)
            text = "".join(delta.text for delta in mine)
            logprobs = self._logprobs(index, [entry for delta in mine for entry in delta.logprobs])
            choice = {"index": index, "finish_reason": FINISH.get(mine[-1].finish_reason), "logprobs": logprobs}
            said = {"message": {"role": "assistant", "content": text}} if self.chat else {"text": text}
            choices.append(choice | said)
        return self._envelope(choices) | {"usage": self._usage()}

    def _envelope(self, choices: list[dict[str, Any]], suffix: str = "") -> dict[str, Any]:
        prefix, kind = ("chatcmpl", "chat.completion" + suffix) if self.chat else ("cmpl", "text_completion")
        return {
            "id": f"{prefix}-{self.answer.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.answer.model,
            "choices": choices,
        }

    def _count(self, delta: Delta) -> None:
        self.completion_tokens[delta.index] = delta.completion_tokens
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)

    def _usage(self) -> dict[str, Any]:
        completion = sum(self.completion_tokens.values())
        return {
            "prompt_tokens": self.answer.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.answer.prompt_tokens + completion,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def _logprobs(self, index: int, entries: Sequence[common_pb2.TokenLogprobs]) -> dict[str, Any] | None:
        if not self.logprobs:
            return None
        return self._chat_logprobs(entries) if self.chat else self._completion_logprobs(index, entries)

    def _chat_logprobs(self, entries: Sequence[common_pb2.TokenLogprobs]) -> dict[str, Any]:
        content = [
            self._alternative(entry.sampled) | {"top_logprobs": [self._alternative(top) for top in entry.top]}
            for entry in entries
        ]
        return {"content": content, "refusal": None}

    def _alternative(self, entry: common_pb2.TokenLogprob) -> dict[str, Any]:
        data = self.tokenizer.token_bytes((entry.token_id,))
        return {"token": data.decode("utf-8", "replace"), "logprob": entry.logprob, "bytes": list(data)}

    def _completion_logprobs(self, index: int, entries: Sequence[common_pb2.TokenLogprobs]) -> dict[str, Any]:
        tokens = [self._text(entry.sampled) for entry in entries]
        offsets, at = [], self.offsets.get(index, 0)
        for token in tokens:
            offsets.append(at)
            at += len(token)
        self.offsets[index] = at
        return {
            "tokens": tokens,
            "token_logprobs": [entry.sampled.logprob for entry in entries],
            "top_logprobs": [{self._text(top): top.logprob for top in entry.top} for entry in entries],
            "text_offset": offsets,
        }

    def _text(self, entry: common_pb2.TokenLogprob) -> str:
        return self.tokenizer.decode((entry.token_id,), keep_special=True)
