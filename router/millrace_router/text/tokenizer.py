"""Text to token ids and back. All other parts of the system handle token ids only.

The tokenizer is a byte-level BPE, as every DeepSeek and Kimi model has.
"""

import asyncio
import json
import math
import re
import types
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path

import jinja2
from millrace.v1 import common_pb2
from millrace_common.config import ConfigError
from millrace_common.json_values import Json, JsonObject
from millrace_common.model_files import read_object, read_text
from millrace_common.quoted import cut
from millrace_common.tokenizer_file import CONFIG, load_tokenizer, token_bytes
from millrace_rpc.errors import FieldError
from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders

from millrace_router.text import markers
from millrace_router.text.call_arguments import as_object
from millrace_router.text.chat_format import EXTENSIONS, ChatFormat, Style, Tool, described
from millrace_router.text.client_text import BY_DEFAULT, GUARD, ClientText, Source, ids_within
from millrace_router.text.limited_template import LimitedEnvironment, LimitedTemplate, TooMuch
from millrace_router.text.markers import THINK, THINK_END
from millrace_router.text.tool_calls import with_ids

V32_TEMPLATE = Path(__file__).with_name("deepseek_v32.jinja")
LONG_TEXT = 2_000  # characters from which on encoding leaves the event loop
_NOT_ASCII = re.compile(f"[^\0-\x7f{GUARD}]")
REFUSALS = (jinja2.TemplateError, RecursionError, TypeError, ValueError)  # of templates


class TooManyTokens(Exception):
    """Its argument is their number."""


class Tokenizer:
    """`bos` is a token id, None when the model has none."""

    def __init__(
        self,
        tokenizer: HfTokenizer,
        config: Mapping[str, Json],
        chat_template: str | None,
        special_tokens_in: Collection[Source],
    ) -> None:
        self._hf = tokenizer
        self._hf.post_processor = None  # it would add tokens, which no text here wants, and move the places of others
        self._clients = ClientText(tokenizer, special_tokens_in)
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            kind = type(tokenizer.decoder).__name__
            raise ConfigError(f"model: the tokenizer's decoder is {kind}, but only ByteLevel is supported")
        self._bytes = token_bytes(tokenizer)
        self._added = frozenset(tokenizer.get_added_tokens_decoder())
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._shown = [b"" if i in special else data for i, data in enumerate(self._bytes)]
        named = {name: _content(config.get(name)) for name in ("bos_token", "eos_token")}
        self._names = {name: text for name, text in named.items() if text is not None}
        bos = self._names.get("bos_token")
        self.bos = None if bos is None else tokenizer.token_to_id(bos)
        self.longest_token = max(map(len, self._bytes), default=1)  # bytes
        self._template = _compile(chat_template, self._names) if chat_template else None
        self._objects = self._template is not None and _wants_objects(self._template, self._names)
        takes_none = self._template is None or _takes_none(self._template, self._names, self._objects)
        self._no_text = None if takes_none else ""
        vocabulary = tokenizer.get_vocab()
        self.format = ChatFormat.of(chat_template or "", vocabulary)
        self._think, self._think_end = self.added_token(THINK), vocabulary.get(THINK_END)
        self._reasoning_ends = {vocabulary.get(text) for text in (THINK_END, *self.format.ends_reasoning)}
        for marker in markers.ALL:
            if marker in vocabulary:  # whether or not it is a special token, parsers want to see it
                self._shown[vocabulary[marker]] = marker.encode()

    @classmethod
    def load(
        cls, folder: str | Path, chat_template: str = "", special_tokens_in: Collection[Source] = BY_DEFAULT
    ) -> "Tokenizer":
        """`chat_template`: a file instead of the folder's template. DeepSeek V3.2 has none, so ours is used.
        `special_tokens_in`: the texts in which clients may write special tokens. Raises ConfigError without a usable
        tokenizer.
        """
        folder = Path(folder)
        file = Path(chat_template) if chat_template else folder / "chat_template.jinja"
        own = bool(chat_template) or file.exists()
        setting, origin = "chat_template" if chat_template else "model", file if own else folder / CONFIG
        try:
            tokenizer = load_tokenizer(folder)
            config = read_object(folder / CONFIG)
        except ValueError as error:
            raise ConfigError(f"model: no usable tokenizer: {error}") from error
        try:
            template = read_text(file) if own else config.get("chat_template")
        except ValueError as error:
            raise ConfigError(f"{setting}: no usable chat template: {error}") from error
        if template is None and markers.DSML in tokenizer.get_vocab():
            template = V32_TEMPLATE.read_text(encoding="utf-8")
        try:
            return cls(tokenizer, config, template, special_tokens_in)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{setting}: {origin}: the chat template cannot be used: {error}") from error

    @property
    def has_template(self) -> bool:
        return self._template is not None

    async def encode(self, text: str, add_bos: bool, most: float = math.inf) -> list[int]:
        """`text`: a client's prompt, with `add_bos`, or what `render` made. Long texts are encoded in a thread. Raises
        TooManyTokens for more than `most`.
        """
        if len(text) < LONG_TEXT:
            return self._encode(text, add_bos, most)
        return await asyncio.to_thread(self._encode, text, add_bos, most)

    def decode(self, ids: Iterable[int], keep_special: bool = False) -> str:
        return self.token_bytes(ids, keep_special).decode("utf-8", "replace")

    def token_bytes(self, ids: Iterable[int], keep_special: bool = True) -> bytes:
        """Ids beyond the tokenizer's vocabulary (the model's may be padded) are empty."""
        table = self._bytes if keep_special else self._shown
        try:
            return b"".join([table[i] for i in ids])
        except IndexError:
            return b"".join([table[i] for i in ids if i < len(table)])

    def render(
        self,
        messages: Sequence[Mapping[str, Json]],
        tools: Sequence[Tool] = (),
        arguments: Mapping[str, Json] = types.MappingProxyType({}),
    ) -> str:
        """The chat template's text, ready for the assistant's turn, for `encode` only: it may have GUARD in it.
        INVALID_ARGUMENT when the template refuses. `arguments` are its own, for example `thinking` of DeepSeek V3.1.
        """
        if self._template is None:
            raise FieldError("messages", "cannot be used: the model has no chat template; send a prompt instead")
        if self.format.style is Style.KIMI:
            messages = with_ids(messages)
        try:
            messages = self._clients.guarded([self._shown_as(turn) for turn in messages], "chats")
            tools = [Tool(*self._clients.guarded(tool, "chats")) for tool in tools]
            if tools and not self.format.takes_tools:
                assert self.format.style is not None, "checked when the request came in"
                messages = _with_system(messages, described(tools, self.format.style))
            return self._template.render(
                {**self._clients.guarded({**arguments}, "chats"), **self._names},
                messages=messages,
                tools=[tool.as_json() for tool in tools] or None,
                add_generation_prompt=True,
            )
        except REFUSALS as error:
            why = cut(str(error).replace(GUARD, ""), 300)
            raise FieldError("messages", f"are refused by the chat template: {why}") from error

    def _shown_as(self, turn: Mapping[str, Json]) -> JsonObject:
        role = "system" if turn["role"] == "developer" else turn["role"]
        shown = {**turn, "role": role, "content": self._no_text if turn["content"] is None else turn["content"]}
        if self._objects and "tool_calls" in turn:
            shown["tool_calls"] = [_with_object(call) for call in turn["tool_calls"]]
        return shown

    def thinking(self, prompt: Sequence[int]) -> bool:
        """Whether the output that follows the prompt begins inside the model's reasoning."""
        if self._think is None:  # <think> is several tokens
            return self.decode(prompt[-8:]).rstrip().endswith(THINK)
        return next((i for i in reversed(prompt[-8:]) if self.token_bytes([i]).strip()), None) == self._think

    def reasoning_end(self, ids: Sequence[int]) -> int | None:
        """Number of output ids of the reasoning, its end mark included; None: it does not end here."""
        return next((count for count, i in enumerate(ids, 1) if i in self._reasoning_ends), None)

    def added_token(self, text: str) -> int | None:
        """The id of the added token with this text; None: there is none."""
        token = self._hf.token_to_id(text)
        return token if token in self._added else None

    def after_reasoning(self, sampling: common_pb2.SamplingParams, prompt: Sequence[int]) -> None:
        """Let a grammar, which is for the answer, begin after the reasoning that the prompt has begun."""
        given = not sampling.HasField("grammar") or sampling.grammar.HasField("after_token_id")
        if not given and self._think_end is not None and self.thinking(prompt):
            sampling.grammar.after_token_id = self._think_end

    def _encode(self, text: str, add_bos: bool, most: float = math.inf) -> list[int]:
        if add_bos:
            text = self._clients.guarded(text, "prompts")
        if GUARD in text:
            ids, count = self._clients.encode(text, most)
        else:  # `encode` would also find the place of each token in the text
            ids, count = ids_within(self._hf.encode_batch_fast([text], add_special_tokens=False)[0], most)
        first = [self.bos] if add_bos and self.bos is not None else []
        if count > most:
            raise TooManyTokens(count + len(first))
        ids[:0] = first
        return ids


def _with_system(messages: Sequence[Mapping[str, Json]], text: str) -> list[Mapping[str, Json]]:
    """`text` at the end of the system message, or as one."""
    first, rest = (messages[0], messages[1:]) if messages and messages[0]["role"] == "system" else (None, messages)
    content = f"{first['content']}\n\n{text}" if first is not None else text
    return [{"role": "system", "content": content}, *rest]


def _content(token: Json) -> str | None:
    """tokenizer_config.json writes a token as its text or as an object with it."""
    text = token.get("content") if isinstance(token, dict) else token
    if text is not None and not isinstance(text, str):
        raise ConfigError(f"model: {CONFIG} has a token that is not text: {text!r}")
    return text


def _compile(source: Json, names: Mapping[str, str]) -> LimitedTemplate:
    """Raises jinja2.TemplateError for a template that fails with the shortest chat, or is TooMuch with a longer one."""
    if not isinstance(source, str):
        raise ConfigError(f"model: the chat template must be text, not {type(source).__name__}")
    environment = LimitedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=EXTENSIONS)
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = _to_json
    template = LimitedTemplate(environment, source)
    user, assistant, system = ({"role": role, "content": "a"} for role in ("user", "assistant", "system"))
    template.render(names, messages=[user], add_generation_prompt=True)
    try:
        template.render(names, messages=[system, user, assistant, user], add_generation_prompt=True)
    except TooMuch:
        raise
    except REFUSALS:  # some take no system message
        pass
    return template


def _takes_none(template: LimitedTemplate, names: Mapping[str, str], objects: bool) -> bool:
    """Whether the content of calls without a text may be None. The first templates of V3 and R1 show calls only then,
    those of R1-0528 and of the first Kimi K2 fail, and others write the word.
    """
    shown = _shown_call(template, names, None, {} if objects else "{}")
    return shown is not None and "None" not in shown


def _wants_objects(template: LimitedTemplate, names: Mapping[str, str]) -> bool:
    """Whether a template reads arguments as an object: it fails with their text, or quotes it once more."""
    shown = _shown_call(template, names, "", '{"e": 1}')
    quoted = shown is None or r"\"e\"" in shown
    return quoted and _shown_call(template, names, "", {"e": 1}) is not None


def _shown_call(
    template: LimitedTemplate, names: Mapping[str, str], content: str | None, arguments: str | JsonObject
) -> str | None:
    """The prompt of a call and its result; None: the template refuses."""
    call = {"id": "functions.c:0", "type": "function", "function": {"name": "c", "arguments": arguments}}
    messages = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "functions.c:0", "content": "d"},
    )
    try:
        return template.render(names, messages=messages, add_generation_prompt=True)
    except REFUSALS:
        return None


def _with_object(call: Mapping[str, Json]) -> JsonObject:
    function = call["function"]
    return {**call, "function": {**function, "arguments": as_object(function["arguments"])}}


def _to_json(
    value: Json,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """transformers' filter of this name, which published templates are written for."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _NOT_ASCII.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
