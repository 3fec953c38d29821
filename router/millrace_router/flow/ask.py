"""A request as the client sent it, by gRPC or HTTP, unchecked: validate.py has every limit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from millrace.v1 import common_pb2
from millrace_common.json_values import Json
from millrace_rpc.errors import Path

from millrace_router.text.call_grammar import Calls
from millrace_router.text.call_stream import Offer
from millrace_router.text.chat_format import Tool


class Chat(NamedTuple):
    """`messages` have the form that chat templates take. `required`: tools of which one must be called; none: the model
    decides. `arguments` are the template's own. `ignored`: parts of the request that are left out, each with its type.
    """

    messages: tuple[Mapping[str, Json], ...]
    tools: tuple[Tool, ...] = ()
    required: tuple[Tool, ...] = ()
    parallel: bool = True  # several calls at once
    arguments: Mapping[str, Json] = {}
    ignored: Mapping[str, str] = {}  # tools[1]: web_search

    def offer(self, certain: bool) -> Offer | None:
        """What the model may call; `certain`: a grammar is set."""
        ids = {call["id"] for turn in self.messages for call in turn.get("tool_calls", ())}
        return Offer({tool.name for tool in self.tools}, ids, certain) if self.tools else None


Prompt = str | Chat | list[int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """`numbers`: the scalar fields of SamplingParams that were given. `origins`: the fields of the request from which
    fields with another name come, as for `FieldError.renamed`.
    """

    model: str
    prompt: Prompt | None
    numbers: Mapping[str, float] = field(default_factory=dict)
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    grammar: common_pb2.Grammar | None = None
    calls: Calls | None = None  # tool calls that must be right; they become the grammar
    stop: Sequence[str] = ()
    message: bool = False  # the answer to a chat is told as reasoning, content and calls; else as a plain text
    n: int = 1
    priority: int = 0
    request_id: str = ""
    session_id: str = ""  # requests with the same one begin alike
    keep_s: int = 0  # its cached pages should outlive others for so long
    keep_special_tokens: bool = False
    large: bool = False  # it takes long to render
    timeout_s: float | None = None  # until the client's deadline
    origins: Mapping[Path, Path] = field(default_factory=dict)
