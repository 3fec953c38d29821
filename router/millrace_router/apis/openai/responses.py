"""Answers of /v1/responses: whole ones, and the events of a stream."""

import time
from collections.abc import Iterator

from millrace.v1 import common_pb2
from millrace_common.json_values import Json, JsonObject
from millrace_rpc.errors import MillraceError

from millrace_router.apis.blocks import Block, BlockForm, Kind, Step
from millrace_router.apis.openai.responses_request import ResponsesRequest
from millrace_router.apis.reading import Reading
from millrace_router.flow.inference import Answer
from millrace_router.http.answers import COMMENT, event

PREFIX = {Kind.REASONING: "rs", Kind.TEXT: "msg", Kind.CALL: "fc"}  # of the ids of items
EVENTS = {  # of a growing block: its name, and the field that has the whole in the end
    Kind.REASONING: ("response.reasoning_text", "text"),
    Kind.TEXT: ("response.output_text", "text"),
    Kind.CALL: ("response.function_call_arguments", "arguments"),
}


class ResponseForm(BlockForm):
    keep_alive = COMMENT

    def __init__(self, wanted: ResponsesRequest, answer: Answer, reading: Reading) -> None:
        super().__init__(answer, reading)
        self._wanted = wanted
        self._created = int(time.time())
        self._sent = 0  # events

    def begin(self) -> Iterator[bytes]:
        begun = self._response("in_progress", [])
        yield self._event("response.created", response=begun)
        yield self._event("response.in_progress", response=begun)

    def ended(self) -> JsonObject:
        output = [self._item(block, self._status(block)) for block in self.blocks.all]
        if self._cut:
            response = self._response("incomplete", output)
            return response | {"incomplete_details": {"reason": "max_output_tokens"}, "usage": self._usage()}
        return self._response("completed", output) | {"completed_at": int(time.time()), "usage": self._usage()}

    def end(self) -> bytes:
        response = self.ended()
        return self._event(f"response.{response['status']}", response=response)

    def fail(self, error: MillraceError) -> bytes:
        output = [self._item(block, "incomplete") for block in self.blocks.all]
        code = error.row.openai_code or ("rate_limit_exceeded" if error.row.http == 429 else "server_error")
        failed = self._response("failed", output) | {"error": {"code": code, "message": error.message}}
        begin = [] if self._sent else self.begin()
        return b"".join((*begin, self._event("response.failed", response=failed)))

    @property
    def _cut(self) -> bool:
        return self.reading.latest.finish_reason == common_pb2.FINISH_REASON_LENGTH

    def _status(self, block: Block) -> str:
        return "incomplete" if self._cut and block is self.blocks.all[-1] else "completed"

    def change(self, step: Step, block: Block, piece: str) -> Iterator[bytes]:
        """The events of a change. Items but calls have one part, which is told of too."""
        name, field = EVENTS[block.kind]
        where: JsonObject = {"item_id": self._id(block), "output_index": block.index}
        part = {} if block.kind is Kind.CALL else {"content_index": 0}
        logprobs: JsonObject = {"logprobs": []} if block.kind is Kind.TEXT else {}
        match step:
            case Step.BEGIN:
                item = self._item(Block(block.kind, block.index, block.name, block.id), "in_progress")
                empty = item.pop("content", [])
                item |= {"content": []} if part else {}
                yield self._event("response.output_item.added", output_index=block.index, item=item)
                if part:
                    yield self._event("response.content_part.added", **where, **part, part=empty[0])
            case Step.MORE:
                yield self._event(f"{name}.delta", **where, **part, **logprobs, delta=piece)
            case Step.END:
                item = self._item(block, self._status(block))
                yield self._event(f"{name}.done", **where, **part, **logprobs, **{field: block.text})
                if part:
                    yield self._event("response.content_part.done", **where, **part, part=item["content"][0])
                yield self._event("response.output_item.done", output_index=block.index, item=item)

    def _event(self, kind: str, **fields: Json) -> bytes:
        self._sent += 1
        return event({"type": kind, "sequence_number": self._sent - 1, **fields}, kind)

    def _id(self, block: Block) -> str:
        return f"{PREFIX[block.kind]}_{self.answer.request_id}_{block.index}"

    def _item(self, block: Block, status: str) -> JsonObject:
        item: JsonObject = {"id": self._id(block), "status": status}
        match block.kind:
            case Kind.REASONING:
                reasoning = {"type": "reasoning_text", "text": block.text}
                return item | {"type": "reasoning", "summary": [], "content": [reasoning]}
            case Kind.TEXT:
                text = {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}
                return item | {"type": "message", "role": "assistant", "content": [text]}
            case Kind.CALL:
                call = {"call_id": block.id, "name": block.name, "arguments": block.text}
                return item | {"type": "function_call"} | call

    def _response(self, status: str, output: list[JsonObject]) -> JsonObject:
        wanted = self._wanted
        given = wanted.model_dump(include={"instructions", "max_output_tokens", "temperature", "top_p"})
        given["tools"] = [{"type": tool.type, **tool.about()} for tool in wanted.tools if tool.served]
        given |= wanted.model_dump(include={"parallel_tool_calls", "tool_choice", "truncation"})
        return given | {
            "id": f"resp_{self.answer.request_id}",
            "object": "response",
            "created_at": self._created,
            "completed_at": None,
            "status": status,
            "error": None,
            "incomplete_details": None,
            "model": self.answer.model,
            "output": output,
            "usage": None,
            "store": False,
            "previous_response_id": None,
            "reasoning": {"effort": wanted.reasoning.effort, "summary": None},
            "text": {"format": wanted.text.format.model_dump(by_alias=True, exclude_unset=True)},
            "metadata": {},
            **self.extensions,
        }

    def _usage(self) -> JsonObject:
        prompt, output = self.answer.prompt_tokens, self.reading.latest.completion_tokens
        cached = self.reading.cached_tokens
        return {
            "input_tokens": prompt,
            "input_tokens_details": {
                "cached_tokens": cached,
                "cache_write_tokens": self.answer.written_tokens(cached),
            },
            "output_tokens": output,
            "output_tokens_details": {"reasoning_tokens": self.reading.reasoning_tokens},
            "total_tokens": prompt + output,
        }
