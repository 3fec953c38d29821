"""Conversion between protobuf messages and the engine's structs. Lists are bounded here, and values are checked by the
engine (engine/schedule/limits.py).
"""

import dataclasses
from array import array

import msgspec
from millrace.v1 import common_pb2, kv_pb2, worker_pb2
from millrace_common import sampling_limits as limits
from millrace_common.reasons import Reason
from millrace_common.step_times import StepTimes
from millrace_rpc.errors import TABLE, FieldError, check_count

from millrace_serve.engine import core
from millrace_serve.engine.cache.kv_pool import KvLayout
from millrace_serve.engine.drafts.limits import MOST_DRAFTS
from millrace_serve.transfer.base import MemoryHandle

_FINISH = {reason: common_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in core.FinishReason}
_FINISH_BACK = {value: reason for reason, value in _FINISH.items()}


def request_id(wire: common_pb2.AttemptId) -> core.RequestId:
    if wire.room == 0:
        raise FieldError("room", "must not be 0")
    return core.RequestId(wire.room, wire.attempt)


def attempt_id(id: core.RequestId) -> common_pb2.AttemptId:
    return common_pb2.AttemptId(room=id.room, attempt=id.attempt)


def check_counts(wire: common_pb2.SamplingParams) -> None:
    """Raises MillraceError for more entries than an engine takes, before lists are made of them."""
    grammar = wire.grammar
    check_count("stop_token_ids", len(wire.stop_token_ids), limits.MAX_STOP_TOKEN_IDS)
    check_count("logit_bias", len(wire.logit_bias), limits.MAX_LOGIT_BIAS)
    check_count("grammar.forbidden_before", len(grammar.forbidden_before), limits.MAX_MARKS)
    check_count("grammar.marks", len(grammar.marks), limits.MAX_MARKS)


def request(
    wire: worker_pb2.EngineRequest, route: core.Route, max_tokens: int, fetches_prefix: bool = False
) -> core.Request:
    """The engine checks the values (engine/schedule/limits.py). Raises MillraceError: there is no such message, or it
    has more tokens or entries than an engine takes.
    """
    check_counts(wire.sampling)
    return core.Request(
        id=request_id(wire.id),
        token_ids=token_ids(wire, max_tokens),
        sampling=sampling_params(wire.sampling),
        route=route,
        num_prior_outputs=wire.num_prior_outputs,
        priority=wire.priority,
        timeout_s=wire.timeout_ms / 1000 if wire.timeout_ms else None,
        cache_salt=wire.cache_salt,
        keep_s=wire.keep_s,
        tpot_limit_s=wire.tpot_limit_ms / 1000,
        ttft_limit_s=wire.ttft_limit_ms / 1000,
        fetches_prefix=fetches_prefix,
    )


def token_ids(wire: worker_pb2.EngineRequest, max_tokens: int) -> memoryview:
    if len(prompt := wire.prompt) % core.TOKEN_BYTES:  # each read makes bytes anew
        raise FieldError("prompt", f"has {len(prompt)} bytes; a token id has {core.TOKEN_BYTES}")
    if (tokens := len(prompt) // core.TOKEN_BYTES or len(wire.token_ids)) > max_tokens:
        message = f"has {tokens} tokens; this engine has max_model_len={max_tokens}"
        raise FieldError("prompt", message, reason=Reason.CONTEXT_TOO_LONG)
    return memoryview(prompt).cast("I") if prompt else memoryview(array("I", wire.token_ids))


def sampling_params(wire: common_pb2.SamplingParams) -> core.SamplingParams:
    values = {name: getattr(wire, name) for name in limits.NUMBERS if wire.HasField(name)}
    return core.SamplingParams(
        logit_bias=dict(wire.logit_bias),
        stop_token_ids=tuple(wire.stop_token_ids),
        ignore_eos=wire.ignore_eos,
        grammar=_grammar(wire.grammar) if wire.HasField("grammar") else None,
        **{"max_tokens": 0, **values},
    )


def _grammar(wire: common_pb2.Grammar) -> core.Grammar:
    kind = wire.WhichOneof("kind")
    if kind is None:
        raise FieldError("grammar", "has no kind")
    after = wire.after_token_id if wire.HasField("after_token_id") else None
    return core.Grammar(
        core.GrammarKind(kind), getattr(wire, kind), after, tuple(wire.forbidden_before), tuple(wire.marks)
    )


def wire_output(output: core.SequenceOutput) -> worker_pb2.SequenceOutput:
    wire = worker_pb2.SequenceOutput(
        id=attempt_id(output.id),
        first_index=output.first_index,
        token_ids=[token.token_id for token in output.tokens],
        finish_reason=None if output.finish is None else _FINISH[output.finish],
        cached_tokens=output.found.cached_tokens,
        host_cached_tokens=output.found.host_cached_tokens,
        fetched_tokens=output.found.fetched_tokens,
        drafted_tokens=output.num_drafted,
        accepted_draft_tokens=output.num_accepted,
    )
    if output.tokens and output.tokens[0].logprob is not None:
        wire.logprobs.extend(map(_wire_logprobs, output.tokens))
    if output.error is not None:
        wire.failure.CopyFrom(wire_failure(output.error))
    return wire


def core_output(wire: worker_pb2.SequenceOutput) -> core.SequenceOutput:
    if wire.logprobs:
        tops = [tuple(core.TopLogprob(t.token_id, t.logprob) for t in one.top) for one in wire.logprobs]
        own = [one.sampled.logprob for one in wire.logprobs]
        tokens = list(map(core.TokenOutput, wire.token_ids, own, tops))
    else:
        tokens = [core.TokenOutput(token) for token in wire.token_ids]
    error = core_failure(wire.failure) if wire.HasField("failure") else None
    finish = _FINISH_BACK.get(wire.finish_reason)
    found = core.CachedTokens(wire.cached_tokens, wire.host_cached_tokens, wire.fetched_tokens)
    counts = 0.0, wire.drafted_tokens, wire.accepted_draft_tokens  # it was queued elsewhere
    return core.SequenceOutput(request_id(wire.id), wire.first_index, tokens, finish, error, found, *counts)


def wire_failure(failure: core.Failure) -> common_pb2.Failure:
    retry_after_ms = round(TABLE[Reason(failure.reason)].retry_after_s * 1000)
    return common_pb2.Failure(reason=failure.reason, message=failure.message, retry_after_ms=retry_after_ms)


def core_failure(wire: common_pb2.Failure) -> core.Failure:
    """A reason that this version does not have is INTERNAL."""
    return core.Failure(Reason.__members__.get(wire.reason, Reason.INTERNAL), wire.message)


def _wire_logprobs(token: core.TokenOutput) -> common_pb2.TokenLogprobs:
    return common_pb2.TokenLogprobs(
        sampled=common_pb2.TokenLogprob(token_id=token.token_id, logprob=token.logprob),
        top=[common_pb2.TokenLogprob(token_id=top.token_id, logprob=top.logprob) for top in token.top],
    )


def wire_chunk(chunk: core.KvChunk) -> kv_pb2.KvChunk:
    return kv_pb2.KvChunk(
        first_page=chunk.first_page,
        page_ids=chunk.page_ids,
        fingerprints=chunk.fingerprints,
        num_tokens=chunk.num_tokens,
        last=chunk.last,
        first=wire_output(chunk.first) if chunk.first else None,
        drafts=chunk.first.drafts if chunk.first else None,
    )


def core_chunk(id: core.RequestId, wire: kv_pb2.KvChunk) -> core.KvChunk:
    """Of more drafts than an engine takes, the first ones."""
    drafts = tuple(wire.drafts[:MOST_DRAFTS])
    first = msgspec.structs.replace(core_output(wire.first), drafts=drafts) if wire.HasField("first") else None
    pages, fingerprints = list(wire.page_ids), list(wire.fingerprints)
    return core.KvChunk(id, wire.first_page, pages, fingerprints, wire.num_tokens, wire.last, first)


def wire_memory(handle: MemoryHandle) -> kv_pb2.RankMemory:
    return kv_pb2.RankMemory(**msgspec.structs.asdict(handle))


def core_memory(wire: kv_pb2.RankMemory) -> MemoryHandle:
    return MemoryHandle(**{name: getattr(wire, name) for name in MemoryHandle.__struct_fields__})


def wire_layout(layout: KvLayout) -> common_pb2.KvLayout:
    names = "page_size", "num_layers", "dtype", "latent_width", "rope_width", "page_bytes", "fingerprint"
    return common_pb2.KvLayout(model=layout.model_hash, **{name: getattr(layout, name) for name in names})


def wire_load(load: core.Load) -> worker_pb2.ReplicaLoad:
    times = worker_pb2.StepTimes(**dataclasses.asdict(StepTimes(*load.step_times))) if load.step_times else None
    return worker_pb2.ReplicaLoad(**{**msgspec.structs.asdict(load), "step_times": times})
