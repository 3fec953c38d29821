"""Every limit of a request, checked in one place, before any work, for gRPC and HTTP alike.

Both fronts fill an `Ask` with what the client sent; `check` and `fit` refuse it with an error that names the field
and its limit. The order: what needs no tokens first (`check`), then, with the prompt's tokens, the context (`fit`).
"""

import math
import secrets
from collections.abc import Collection, Sequence
from typing import Any

from millrace.v1 import common_pb2, inference_pb2, worker_pb2
from millrace_common.grammar import text as grammar_text
from millrace_common.quoted import cut
from millrace_common.reasons import Reason
from millrace_common.sampling_limits import LOGIT_BIAS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, NUMBERS, PRIORITY, Range
from millrace_rpc.errors import FieldError, MillraceError, Path, check_count

from millrace_router.config import RouterConfig
from millrace_router.flow.ask import Ask, Chat, Prompt
from millrace_router.text.chat_format import Tool

MAX_N = 16  # answers to a request
MAX_STOP, MAX_STOP_CHARS = 16, 256
MAX_TOOLS = 128
MAX_REQUEST_ID_CHARS = 128
MAX_SESSION_ID_CHARS = 512
MAX_KEEP_S = 24 * 3600
MORE_IDS = 1 << 17  # than twice the context: to make a text of
NO_PARAMS = common_pb2.SamplingParams()
ROLES = ("system", "developer", "user", "assistant", "tool")


def check(ask: Ask, model: worker_pb2.WorkerInfo, names: Collection[str], config: RouterConfig) -> None:
    """`names`: as for `check_model`."""
    check_model(ask.model, names)
    check_prompt(ask.prompt, model)
    if isinstance(ask.prompt, Chat):
        _check_tools(ask.prompt.tools)
        if config.strict_tools:
            for where, kind in ask.prompt.ignored.items():  # in the names of the client's API
                message = f"{where}.type {cut(kind)!r} is not supported; remove it, or set strict_tools=false"
                raise MillraceError(Reason.INVALID_ARGUMENT, f"{message} to ignore it", param=f"{where}.type")
    if ask.grammar is not None or ask.calls is not None:
        _check_constrained(ask, model)
    for name, value in ask.numbers.items():
        _within(name, value, NUMBERS[name])
    _within("n", ask.n, Range(1, MAX_N))
    _within("priority", ask.priority, PRIORITY)
    _within("keep_s", ask.keep_s, Range(0, MAX_KEEP_S))
    _check_tokens(ask, model)
    _check_stop(ask.stop)
    for name, text, most in (
        ("request_id", ask.request_id, MAX_REQUEST_ID_CHARS),
        ("session_id", ask.session_id, MAX_SESSION_ID_CHARS),
    ):
        if len(text) > most:
            raise FieldError(name, f"must have at most {most} characters")
    if ask.timeout_s is not None and math.isnan(ask.timeout_s):
        raise FieldError("timeout_s", f"must be a number of seconds, not {ask.timeout_s}")
    if ask.timeout_s is not None and ask.timeout_s <= 0:
        text = "the deadline had passed when the request arrived: raise timeout_s"
        raise MillraceError(Reason.DEADLINE_EXCEEDED, text, param="timeout_s")


def check_model(name: str, names: Collection[str]) -> None:
    """`names`: under which the model is served."""
    if name and name not in names:
        raise FieldError(
            "model",
            f"{cut(name)!r} is not served here; use {' or '.join(map(repr, names))}",
            reason=Reason.MODEL_NOT_FOUND,
        )


def check_prompt(prompt: Prompt | None, model: worker_pb2.WorkerInfo) -> None:
    if prompt is None or prompt in ("", []):
        raise FieldError("prompt", "must not be empty")
    if isinstance(prompt, list):
        check_ids("prompt", prompt, model)
    elif isinstance(prompt, Chat):
        if not prompt.messages:
            raise FieldError("messages", "must not be empty")
        if len(prompt.messages) > model.max_context:
            raise too_long(model, f"at least {len(prompt.messages)}")
        for i, message in enumerate(prompt.messages):
            if message["role"] not in ROLES:
                raise FieldError(
                    ("messages", i, "role"), f"must be one of {', '.join(ROLES)}, not {cut(message['role'])!r}"
                )


def check_counts(
    prompt: inference_pb2.Prompt,
    model: worker_pb2.WorkerInfo,
    sampling: common_pb2.SamplingParams = NO_PARAMS,
    stop: Sequence[str] = (),
) -> None:
    """Of a message, before lists are made of its fields, during which nothing else runs."""
    tokens, turns = len(prompt.token_ids.ids), len(prompt.chat.messages)
    if max(tokens, turns) > model.max_context:
        raise too_long(model, tokens or f"at least {turns}")
    check_count("logit_bias", len(sampling.logit_bias), MAX_LOGIT_BIAS)
    check_count("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS)
    _check_stop(stop)


def check_ids(name: str, ids: Sequence[int], model: worker_pb2.WorkerInfo) -> None:
    if ids and min(ids) >= 0 and max(ids) < model.vocab_size:
        return
    for i, token in enumerate(ids):
        _check_id((name, i), token, model)


def _check_id(path: Path, token: int, model: worker_pb2.WorkerInfo) -> None:
    if not 0 <= token < model.vocab_size:
        raise FieldError(path, f"must be a token id from 0 to {model.vocab_size - 1}, not {token}")


def check_text_length(text: str, longest_token: int, model: worker_pb2.WorkerInfo) -> None:
    """Refuse, before tokenizing, a text that cannot fit."""
    if len(text) > longest_token * model.max_context:
        raise too_long(model, f"at least {len(text) // longest_token}")


def check_size(size: int, most: int) -> None:
    if size > most:
        raise MillraceError(Reason.MESSAGE_TOO_LARGE, f"the request has {size} bytes; the limit is {most}")


def fit(ask: Ask, prompt_tokens: int, model: worker_pb2.WorkerInfo) -> common_pb2.SamplingParams:
    """The sampling parameters with seed and max_tokens resolved, for a prompt of this many tokens."""
    room = model.max_context - prompt_tokens
    if room < 1:
        raise too_long(model, prompt_tokens)
    max_tokens = int(ask.numbers.get("max_tokens", room))
    if max_tokens > room:
        raise too_long(model, prompt_tokens, max_tokens)
    if ask.numbers.get("min_tokens", 0) > max_tokens:
        raise FieldError("min_tokens", "must be at most ", ("max_tokens",), f", which is {max_tokens}")
    # Any: a field of SamplingParams is an int or a float
    numbers: dict[str, Any] = {"seed": secrets.randbits(64), **ask.numbers, "max_tokens": max_tokens}
    return common_pb2.SamplingParams(
        **numbers,
        logit_bias=ask.logit_bias,
        stop_token_ids=ask.stop_token_ids,
        ignore_eos=ask.ignore_eos,
        grammar=ask.grammar,
    )


def _check_tools(tools: Sequence[Tool]) -> None:
    check_count("tools", len(tools), MAX_TOOLS)
    names = set()
    for tool in tools:
        if tool.name in names:
            raise FieldError((*tool.path, "name"), f"{cut(tool.name)!r} is used by another tool")
        names.add(tool.name)


def _check_constrained(ask: Ask, model: worker_pb2.WorkerInfo) -> None:
    """Check everything that needs no compiler; flow/grammars.py compiles."""
    for grammar in (ask.grammar, ask.calls and ask.calls.answer):
        if grammar is None:
            continue
        kind = grammar.WhichOneof("kind")
        if kind is None:
            raise FieldError("grammar", "needs a kind: json_schema or regex")
        if kind == grammar_text.LARK or grammar.marks or grammar.forbidden_before:
            raise FieldError("grammar", "must be a json_schema or a regex; only routers make other kinds")
        if problem := grammar_text.problem(kind, getattr(grammar, kind)):
            raise FieldError("grammar", f"has a {kind} that cannot be used: {problem}")
        if grammar.HasField("after_token_id"):
            _check_id(("grammar", "after_token_id"), grammar.after_token_id, model)
    for name, given in (("ignore_eos", ask.ignore_eos), ("min_tokens", ask.numbers.get("min_tokens", 0) > 0)):
        if given:
            raise FieldError(name, "cannot be combined with ", ("grammar",), ", which decides where the output may end")


def _check_tokens(ask: Ask, model: worker_pb2.WorkerInfo) -> None:
    check_count("logit_bias", len(ask.logit_bias), MAX_LOGIT_BIAS)
    for token, value in ask.logit_bias.items():
        _check_id(("logit_bias", str(token)), token, model)
        _within(("logit_bias", str(token)), value, LOGIT_BIAS)
    check_count("stop_token_ids", len(ask.stop_token_ids), MAX_STOP_TOKEN_IDS)
    check_ids("stop_token_ids", ask.stop_token_ids, model)


def _check_stop(stop: Sequence[str]) -> None:
    if len(stop) > MAX_STOP:
        raise FieldError("stop", f"must have at most {MAX_STOP} strings, not {len(stop)}")
    for i, text in enumerate(stop):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            raise FieldError(("stop", i), f"must have 1 to {MAX_STOP_CHARS} characters, not {len(text)}")


def _within(path: str | Path, value: float, allowed: Range) -> None:
    if not allowed.holds(value):
        raise FieldError(path, f"must be {allowed}, not {cut(value)}")


def too_long(model: worker_pb2.WorkerInfo, tokens: int | str, max_tokens: int | None = None) -> FieldError:
    """In words of both vendors, which agents search for before they shorten the conversation or the answer."""
    longest = model.max_context
    why: list[str | Path] = [f"prompt is too long: {tokens} tokens > {longest - 1} maximum"]
    if max_tokens is not None:
        why = ["input length and `", ("max_tokens",), f"` exceed context limit: {tokens} + {max_tokens} > {longest}"]
    limit = f"; this model's maximum context length is {longest} tokens for prompt and output"
    return FieldError("prompt", "does not fit: ", *why, limit, reason=Reason.CONTEXT_TOO_LONG)
