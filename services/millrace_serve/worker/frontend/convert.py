"""Between the wire and the engine: protobuf messages to core structs and back. The only place that knows both.

What a message can get wrong by itself is refused here; what depends on the model (vocabulary, context, pages) is
refused by the engine (engine/schedule/limits.py). Comparisons are written so that NaN fails them.
"""

from __future__ import annotations

import msgspec
from millrace.v1 import common_pb2, kv_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import TABLE, MillraceError

from millrace_serve.engine.cache.kv_pool import KvLayout
from millrace_serve.engine.core import (
    Failure,
    FinishReason,
    Grammar,
    GrammarKind,
    KvPart,
    Load,
    Request,
    RequestId,
    Route,
    SamplingParams,
    SequenceOutput,
    TokenOutput,
    TopLogprob,
)
from millrace_serve.transfer.base import MemoryHandle

MAX_STOP_TOKEN_IDS = 64
MAX_LOGIT_BIAS = 1024
RANGES: tuple[tuple[str, float, float], ...] = (  # optional numbers of SamplingParams, limits included
    ("temperature", 0.0, 100.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("logprobs", 0, 20),
)
POSITIVE_RANGES = (("top_p", 1.0), ("repetition_penalty", 100.0))  # above 0, up to the limit
PLAIN = ("top_k", "seed", "min_tokens")  # optional and limited by their wire type or by the engine
PRIORITY = 100

_FINISH = {
    None: common_pb2.FINISH_REASON_UNSPECIFIED,
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: common_pb2.FINISH_REASON_ABORT,
    FinishReason.ERROR: common_pb2.FINISH_REASON_ERROR,
}
_FINISH_BACK = {value: key for key, value in _FINISH.items()}


def invalid(param: str, message: str) -> MillraceError:
    return MillraceError(Reason.INVALID_ARGUMENT, f"{param} {message}", param=param)


# ---------------------------------------------------------------------------------------------------- requests


def request_id(wire: common_pb2.AttemptId) -> RequestId:
    if wire.room == 0:
        raise invalid("room", "must not be 0")
    return RequestId(wire.room, wire.attempt)


def attempt_id(id: RequestId) -> common_pb2.AttemptId:
    return common_pb2.AttemptId(room=id.room, attempt=id.attempt)


def request(wire: worker_pb2.EngineRequest, route: Route) -> Request:
    """Raises MillraceError (INVALID_ARGUMENT) naming field and limit."""
    id = request_id(wire.id)
    if not wire.token_ids:
        raise invalid("token_ids", "must not be empty")
    if wire.num_prior_outputs >= len(wire.token_ids):
        raise invalid("num_prior_outputs", f"is {wire.num_prior_outputs} of {len(wire.token_ids)} token_ids")
    if not -PRIORITY <= wire.priority <= PRIORITY:
        raise invalid("priority", f"is {wire.priority}; it must be in -{PRIORITY}..{PRIORITY}")
    return Request(
        id=id,
        token_ids=list(wire.token_ids),
        sampling=sampling_params(wire.sampling),
        route=route,
        num_prior_outputs=wire.num_prior_outputs,
        priority=wire.priority,
        timeout_s=wire.timeout_ms / 1000 if wire.timeout_ms else None,
    )


def sampling_params(wire: common_pb2.SamplingParams) -> SamplingParams:
    """Raises MillraceError (INVALID_ARGUMENT) naming field and limit."""
    if wire.max_tokens < 1:
        raise invalid("max_tokens", f"is {wire.max_tokens}; it must be set, and at least 1")
    values: dict[str, float | int] = {name: getattr(wire, name) for name in PLAIN if wire.HasField(name)}
    for name, low, high in RANGES:
        if wire.HasField(name):
            values[name] = getattr(wire, name)
            if not low <= values[name] <= high:
                raise invalid(name, f"is {values[name]:g}; it must be in [{low:g}, {high:g}]")
    for name, high in POSITIVE_RANGES:
        if wire.HasField(name):
            values[name] = getattr(wire, name)
            if not 0 < values[name] <= high:
                raise invalid(name, f"is {values[name]:g}; it must be in (0, {high:g}]")
    if wire.min_tokens > wire.max_tokens:
        raise invalid("min_tokens", f"is {wire.min_tokens}; it must be at most max_tokens={wire.max_tokens}")
    if len(wire.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise invalid("stop_token_ids", f"has {len(wire.stop_token_ids)} entries; the limit is {MAX_STOP_TOKEN_IDS}")
    return SamplingParams(
        max_tokens=wire.max_tokens,
        logit_bias=_logit_bias(wire),
        stop_token_ids=tuple(wire.stop_token_ids),
        ignore_eos=wire.ignore_eos,
        grammar=_grammar(wire),
        **values,  # type: ignore[arg-type]
    )


def _logit_bias(wire: common_pb2.SamplingParams) -> dict[int, float]:
    if len(wire.logit_bias) > MAX_LOGIT_BIAS:
        raise invalid("logit_bias", f"has {len(wire.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}")
    for token, bias in wire.logit_bias.items():
        if not -100 <= bias <= 100:
            raise invalid("logit_bias", f"of token {token} is {bias:g}; it must be in [-100, 100]")
    return dict(wire.logit_bias)


def _grammar(wire: common_pb2.SamplingParams) -> Grammar | None:
    """Its text is checked where it is compiled (engine/grammar/xgrammar_compiler.py)."""
    if not wire.HasField("grammar"):
        return None
    kind = wire.grammar.WhichOneof("kind")
    if kind is None:
        raise invalid("grammar", "has no kind")
    after = wire.grammar.after_token_id if wire.grammar.HasField("after_token_id") else None
    return Grammar(GrammarKind(kind), getattr(wire.grammar, kind), after)


# ---------------------------------------------------------------------------------------------------- outputs


def wire_output(output: SequenceOutput) -> worker_pb2.SequenceOutput:
    wire = worker_pb2.SequenceOutput(
        id=attempt_id(output.id),
        first_index=output.first_index,
        token_ids=[token.token_id for token in output.tokens],
        finish_reason=_FINISH[output.finish],
        cached_tokens=output.num_cached_tokens,
    )
    if output.tokens and output.tokens[0].logprob is not None:
        wire.logprobs.extend(map(_wire_logprobs, output.tokens))
    if output.error is not None:
        wire.failure.CopyFrom(wire_failure(output.error))
    return wire


def core_output(wire: worker_pb2.SequenceOutput) -> SequenceOutput:
    if wire.logprobs:
        tokens = [_core_token(*pair) for pair in zip(wire.token_ids, wire.logprobs, strict=True)]
    else:
        tokens = [TokenOutput(token) for token in wire.token_ids]
    error = Failure(wire.failure.reason, wire.failure.message) if wire.HasField("failure") else None
    finish = _FINISH_BACK[wire.finish_reason]
    return SequenceOutput(request_id(wire.id), wire.first_index, tokens, finish, error, wire.cached_tokens)


def wire_failure(failure: Failure) -> common_pb2.Failure:
    row = TABLE.get(failure.reason, TABLE[Reason.INTERNAL])  # type: ignore[call-overload]
    return common_pb2.Failure(
        reason=failure.reason, message=failure.message, retry_after_ms=round(row.retry_after_s * 1000)
    )


def _wire_logprobs(token: TokenOutput) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        sampled=common_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob),
        top=[common_pb2.TokenLogprob(token_id=top.token_id, logprob=top.logprob) for top in token.top],
    )


def _core_token(token_id: int, wire: common_pb2.TokenLogprobs) -> TokenOutput:
    return TokenOutput(token_id, wire.sampled.logprob, tuple(TopLogprob(t.token_id, t.logprob) for t in wire.top))


# ---------------------------------------------------------------------------------------------------- KV


def wire_part(part: KvPart) -> kv_pb2.KvPart:
    return kv_pb2.KvPart(
        first_page=part.first_page,
        page_ids=part.page_ids,
        fingerprints=part.fingerprints,
        num_tokens=part.num_tokens,
        last=part.last,
        first=wire_output(part.first) if part.first else None,
    )


def core_part(id: RequestId, wire: kv_pb2.KvPart) -> KvPart:
    first = core_output(wire.first) if wire.HasField("first") else None
    return KvPart(id, wire.first_page, list(wire.page_ids), list(wire.fingerprints), wire.num_tokens, wire.last, first)


def wire_memory(handle: MemoryHandle) -> kv_pb2.RankMemory:
    return kv_pb2.RankMemory(**msgspec.structs.asdict(handle))


def core_memory(wire: kv_pb2.RankMemory) -> MemoryHandle:
    return MemoryHandle(**{name: getattr(wire, name) for name in MemoryHandle.__struct_fields__})


def wire_layout(layout: KvLayout) -> common_pb2.KvLayout:
    return common_pb2.KvLayout(
        page_size=layout.page_size,
        num_layers=layout.num_layers,
        dtype=layout.dtype,
        latent_width=layout.latent_width,
        rope_width=layout.rope_width,
        page_bytes=layout.page_bytes,
        model=layout.model_hash,
        fingerprint=layout.fingerprint,
    )


def wire_load(load: Load) -> worker_pb2.ReplicaLoad:
    return worker_pb2.ReplicaLoad(**msgspec.structs.asdict(load))
