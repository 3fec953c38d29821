"""Deltas as objects of the OpenAI API: whole answers and stream chunks, for chat and for plain completions."""

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from millrace.v1 import common_pb2
from millrace_common.json_values import JsonObject
from millrace_rpc.errors import MillraceError

from millrace_router.apis.openai import objects
from millrace_router.apis.openai.logprobs import Logprobs
from millrace_router.apis.reading import Reading, call_id
from millrace_router.flow.inference import Answer
from millrace_router.flow.stream import Delta
from millrace_router.http.answers import COMMENT, event, one_line
from millrace_router.text.call_stream import CallDelta
from millrace_router.text.message import ParsedOutput, joined
from millrace_router.text.tokenizer import Tokenizer

STOP, LENGTH, TOOL_CALLS = "stop", "length", "tool_calls"
FINISH: dict[int, str] = {common_pb2.FINISH_REASON_STOP: STOP, common_pb2.FINISH_REASON_LENGTH: LENGTH}


@dataclass(slots=True)
class AnswerShape:
    """One answer on its way out. Reading a delta also counts usage; the objects are plain JSON values."""

    keep_alive: ClassVar = COMMENT

    chat: bool
    answer: Answer
    tokenizer: Tokenizer
    wants_logprobs: bool
    keep_special: bool = False  # special tokens are part of the text
    include_usage: bool = False  # in a stream
    usage_so_far: bool = False  # in every chunk of it
    created: int = field(default_factory=lambda: int(time.time()))
    readings: defaultdict[int, Reading] = field(init=False)  # of chat, by continuation
    latest: dict[int, Delta] = field(default_factory=dict)  # with the counts so far
    logprobs: Logprobs = field(init=False)
    cached_tokens: int = 0
    version: str = ""  # of the weights that compute it
    before: bytes = b""  # what all chunks of a stream have in common
    after: bytes = b""

    def __post_init__(self) -> None:
        self.readings = defaultdict(lambda: Reading(self.answer, self.tokenizer))
        self.logprobs = Logprobs(self.tokenizer, self.keep_special)

    def push(self, delta: Delta) -> bytes:
        part = self._part(delta, whole=False)
        if part["finish_reason"] and part.get("delta", {}).get("tool_calls"):  # clients end calls by the next chunk
            last = part | {"delta": {}, "logprobs": None}
            return self._event(part | {"finish_reason": None}, delta.first) + self._event(last, first=False)
        return self._event(part, delta.first)

    def _event(self, part: JsonObject, first: bool) -> bytes:
        more: JsonObject = self._ignored() if first else {}
        if self.usage_so_far:
            more["usage"] = self._usage()
        if more:
            return event(self._chunk([part]) | more)
        return self.before + one_line(part) + self.after

    def end(self) -> bytes:
        usage = event(self._envelope([], ".chunk") | {"usage": self._usage()}) if self.include_usage else b""
        return usage + b"data: [DONE]\n\n"

    def fail(self, error: MillraceError) -> bytes:
        return event(error.http_body())

    def whole(self, deltas: Sequence[Delta]) -> JsonObject:
        by_index = ([d for d in deltas if d.index == index] for index in sorted({d.index for d in deltas}))
        choices = [self._part(_joined(mine), whole=True) for mine in by_index]
        return self._envelope(choices) | self._ignored() | {"usage": self._usage()}

    def _part(self, delta: Delta, whole: bool) -> JsonObject:
        """An element of `choices`: of an answer, if the delta is the whole output, or of a chunk."""
        self._count(delta)
        part: JsonObject = {"index": delta.index, "finish_reason": None, "logprobs": None}
        if self.wants_logprobs:
            entries, told = delta.logprobs, self.logprobs
            part["logprobs"] = told.of_chat(entries) if self.chat else told.of_text(delta.index, entries)
        finish = FINISH.get(delta.finish_reason)
        if self.chat:
            reading = self.readings[delta.index]
            parsed = reading.read(delta)
            part |= {"message": _message(parsed)} if whole else {"delta": _delta(parsed, delta.first)}
            if reading.called and finish == STOP:
                finish = TOOL_CALLS
        else:
            part["text"] = delta.parsed.text
        part["finish_reason"] = finish
        return part

    def _count(self, delta: Delta) -> None:
        """Keep the counts, and what all chunks have in common until other weights compute them."""
        self.latest[delta.index] = delta
        self.cached_tokens = max(self.cached_tokens, delta.cached_tokens)
        if not self.before or self.version != delta.version:
            self.version = delta.version
            before, empty, after = event(self._chunk([])).rpartition(b"[]")
            self.before, self.after = before + empty[:1], empty[1:] + after

    def _envelope(self, choices: list[JsonObject], suffix: str = "") -> JsonObject:
        prefix, kind = ("chatcmpl", "chat.completion" + suffix) if self.chat else ("cmpl", "text_completion")
        return {
            "id": f"{prefix}-{self.answer.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.answer.model,
            "system_fingerprint": self.version or None,
            "choices": choices,
        }

    def _chunk(self, choices: list[JsonObject]) -> JsonObject:
        return self._envelope(choices, ".chunk") | ({"usage": None} if self.include_usage else {})

    def _ignored(self) -> JsonObject:
        return {"ignored": self.answer.ignored} if self.answer.ignored else {}

    def _usage(self) -> objects.Usage:
        latest = self.latest.values()
        completion = sum(delta.completion_tokens for delta in latest)
        reasoning = sum(reading.reasoning_tokens for reading in self.readings.values())
        details: objects.CompletionDetails = {"reasoning_tokens": reasoning}
        if drafted := sum(delta.usage.drafted_tokens for delta in latest):
            accepted = sum(delta.usage.accepted_draft_tokens for delta in latest)
            details["accepted_prediction_tokens"] = accepted
            details["rejected_prediction_tokens"] = drafted - accepted
        return {
            "prompt_tokens": self.answer.prompt_tokens,
            "completion_tokens": completion,
            "total_tokens": self.answer.prompt_tokens + completion,
            "prompt_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": self.answer.written_tokens(self.cached_tokens),
            },
            "completion_tokens_details": details,
        }


def _joined(deltas: Sequence[Delta]) -> Delta:
    """The whole output of one continuation as one delta."""
    last = deltas[-1]
    return replace(
        last,
        parsed=joined([delta.parsed for delta in deltas]),
        token_ids=[token for delta in deltas for token in delta.token_ids],
        logprobs=[entry for delta in deltas for entry in delta.logprobs],
        cached_tokens=max(delta.cached_tokens for delta in deltas),
    )


def _message(parsed: ParsedOutput) -> objects.ChatMessage:
    """The text is null if there are calls only."""
    content = parsed.text or (None if parsed.calls else "")
    message: objects.ChatMessage = {"role": "assistant", "content": content, "refusal": None}
    if parsed.reasoning:
        message["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        message["tool_calls"] = [_call(call) for call in parsed.calls]
    return message


def _delta(parsed: ParsedOutput, first: bool) -> objects.ChatDelta:
    """Empty fields are left out, except the first delta's content."""
    delta: objects.ChatDelta = {"role": "assistant", "content": ""} if first else {}
    if parsed.text:
        delta["content"] = parsed.text
    if parsed.reasoning:
        delta["reasoning_content"] = parsed.reasoning
    if parsed.calls:
        delta["tool_calls"] = [_call_chunk(call) for call in parsed.calls]
    return delta


def _call_chunk(call: CallDelta) -> objects.CallChunk:
    if not call.name:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function: objects.FunctionDelta = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call_id(call), "type": "function", "function": function}


def _call(call: CallDelta) -> objects.ToolCallObject:
    function: objects.FunctionCall = {"name": call.name, "arguments": call.arguments}
    return {"id": call_id(call), "type": "function", "function": function}
