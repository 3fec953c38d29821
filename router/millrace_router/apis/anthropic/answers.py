"""Answers of the Messages API: whole messages, and the events of a stream."""

from collections.abc import Iterator

from millrace.v1 import common_pb2
from millrace_common.json_values import Json, JsonObject
from millrace_rpc.errors import MillraceError

from millrace_router.apis.blocks import Block, BlockForm, Kind, Step
from millrace_router.http.answers import anthropic_error, event

DELTAS = {  # type of a block's deltas, and the field with the new piece
    Kind.REASONING: ("thinking_delta", "thinking"),
    Kind.TEXT: ("text_delta", "text"),
    Kind.CALL: ("input_json_delta", "partial_json"),
}


class MessageForm(BlockForm):
    keep_alive = event({"type": "ping"}, "ping")

    def begin(self) -> Iterator[bytes]:
        yield _event("message_start", message=self._message([], {"stop_reason": None, "stop_sequence": None}))
        yield self.keep_alive

    def change(self, step: Step, block: Block, piece: str) -> Iterator[bytes]:
        match step:
            case Step.BEGIN:
                yield _event("content_block_start", index=block.index, content_block=_block(block, ""))
            case Step.MORE:
                kind, field = DELTAS[block.kind]
                yield _event("content_block_delta", index=block.index, delta={"type": kind, field: piece})
            case Step.END:
                if block.kind is Kind.REASONING:  # some clients drop a block without it when they send the answer back
                    sign = {"type": "signature_delta", "signature": ""}
                    yield _event("content_block_delta", index=block.index, delta=sign)
                yield _event("content_block_stop", index=block.index)

    def ended(self) -> JsonObject:
        return self._message([_block(block, block.text) for block in self.blocks.all], self._stop())

    def end(self) -> bytes:
        return _event("message_delta", delta=self._stop(), usage=self._usage()) + _event("message_stop")

    def fail(self, error: MillraceError) -> bytes:
        return event(anthropic_error(error), "error")

    def _message(self, content: list[JsonObject], stop: dict[str, str | None]) -> JsonObject:
        return {
            "id": f"msg_{self.answer.request_id}",
            "type": "message",
            "role": "assistant",
            "model": self.answer.model,
            "content": content,
            "usage": self._usage(),
            **stop,
            **self.extensions,
        }

    def _stop(self) -> dict[str, str | None]:
        if self.reading.latest.finish_reason == common_pb2.FINISH_REASON_LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self.reading.latest.stopped_by:
            return {"stop_reason": "stop_sequence", "stop_sequence": self.reading.latest.stopped_by}
        return {"stop_reason": "tool_use" if self.reading.called else "end_turn", "stop_sequence": None}

    def _usage(self) -> JsonObject:
        """`input_tokens` are those that neither came from the cache nor went into it."""
        cached = min(self.reading.cached_tokens, self.answer.prompt_tokens)
        written = self.answer.written_tokens(cached)
        return {
            "input_tokens": self.answer.prompt_tokens - cached - written,
            "cache_creation_input_tokens": written,
            "cache_read_input_tokens": cached,
            "output_tokens": self.reading.latest.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self.reading.reasoning_tokens},
        }


def _block(block: Block, text: str) -> JsonObject:
    match block.kind:
        case Kind.REASONING:
            return {"type": "thinking", "thinking": text, "signature": ""}
        case Kind.TEXT:
            return {"type": "text", "text": text, "citations": None}
        case Kind.CALL:
            return {"type": "tool_use", "id": block.id, "name": block.name, "input": block.arguments if text else {}}


def _event(kind: str, **fields: Json) -> bytes:
    return event({"type": kind, **fields}, kind)
