import math

import pytest
from millrace.v1 import common_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import TABLE, MillraceError
from millrace_serve.engine.core import (
    Failure,
    FinishReason,
    Grammar,
    GrammarKind,
    KvPart,
    Load,
    RequestId,
    Route,
    SequenceOutput,
    TokenOutput,
    TopLogprob,
)
from millrace_serve.transfer.base import MemoryHandle
from millrace_serve.worker.frontend import convert
from millrace_testing.blocks import blocks

ID = RequestId(2**64 - 1, 3)


def wire(**sampling: object) -> worker_pb2.EngineRequest:
    params = common_pb2.SamplingParams(**{"max_tokens": 4, **sampling})
    return worker_pb2.EngineRequest(id=convert.attempt_id(ID), token_ids=[5, 6, 7], sampling=params)


def test_request_keeps_every_value_and_absent_ones_take_their_defaults() -> None:
    given = wire(temperature=0.0, top_k=0, seed=2**64 - 1, logit_bias={7: -1.5}, logprobs=0, stop_token_ids=[9])
    given.num_prior_outputs, given.priority, given.timeout_ms = 1, -5, 1500
    request = convert.request(given, Route.IMPORT)
    assert (request.id, request.token_ids, request.route) == (ID, [5, 6, 7], Route.IMPORT)
    assert (request.num_prior_outputs, request.priority, request.timeout_s) == (1, -5, 1.5)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.logprobs) == (0.0, 1.0, 2**64 - 1, 0)
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({7: -1.5}, (9,))
    assert convert.request(wire(), Route.LOCAL).sampling.temperature == 1.0
    assert convert.request(wire(), Route.LOCAL).timeout_s is None


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.1),
        ("temperature", 100.5),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_p", math.nan),
        ("min_p", math.nan),
        ("min_p", -0.1),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.nan),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -math.inf),
        ("logprobs", 21),
        ("max_tokens", 0),
        ("min_tokens", 5),
        ("stop_token_ids", range(65)),
        ("logit_bias", {1: math.nan}),
        ("logit_bias", {1: 100.5}),
        ("logit_bias", dict.fromkeys(range(1025), 0.0)),
    ],
)
def test_bad_sampling_is_refused_with_the_name_of_the_field(field: str, value: object) -> None:
    with pytest.raises(MillraceError, match=field) as caught:
        convert.request(wire(**{field: value}), Route.LOCAL)
    assert caught.value.reason is Reason.INVALID_ARGUMENT and caught.value.param == field


@pytest.mark.parametrize(
    ("field", "change"),
    [
        ("room", lambda r: r.id.Clear()),
        ("token_ids", lambda r: r.ClearField("token_ids")),
        ("num_prior_outputs", lambda r: setattr(r, "num_prior_outputs", 3)),
        ("priority", lambda r: setattr(r, "priority", 101)),
    ],
)
def test_bad_requests_are_refused_with_the_name_of_the_field(field: str, change) -> None:  # type: ignore[no-untyped-def]
    given = wire()
    change(given)
    with pytest.raises(MillraceError, match=field) as caught:
        convert.request(given, Route.LOCAL)
    assert caught.value.param == field


@pytest.mark.parametrize(
    "output",
    [
        SequenceOutput(ID, 0, [TokenOutput(1)], None, None, 128),
        SequenceOutput(ID, 7, [], FinishReason.ERROR, Failure("KV_EXPIRED", "too late")),
        SequenceOutput(ID, 7, [], FinishReason.ABORT),
        SequenceOutput(ID, 7, [TokenOutput(1)], FinishReason.STOP, num_drafted=9, num_accepted=4),
        SequenceOutput(ID, 2, [TokenOutput(3, -0.5, (TopLogprob(3, -0.5), TopLogprob(4, -1.5)))], FinishReason.STOP),
        SequenceOutput(ID, 2, [TokenOutput(3, -0.5, ()), TokenOutput(4, -1.5, (TopLogprob(4, -1.5),))]),
    ],
)
def test_outputs_survive_the_round_trip(output: SequenceOutput) -> None:
    assert convert.core_output(convert.wire_output(output)) == output


@pytest.mark.parametrize("reason", Reason)
def test_failure_on_the_wire_has_its_wait_in_milliseconds(reason: Reason) -> None:
    wire = convert.wire_failure(Failure(reason, "why"))
    assert (wire.reason, wire.message, wire.retry_after_ms) == (
        reason,
        "why",
        round(1000 * TABLE[reason].retry_after_s),
    )
    assert convert.core_failure(wire) == Failure(reason, "why")


def test_salt_is_bounded() -> None:
    params = common_pb2.SamplingParams(max_tokens=1)
    wire = worker_pb2.EngineRequest(id=convert.attempt_id(ID), token_ids=[5], sampling=params, cache_salt=b"s" * 64)
    assert convert.request(wire, Route.LOCAL).cache_salt == b"s" * 64
    wire.cache_salt += b"s"
    with pytest.raises(MillraceError, match="cache_salt has 65 bytes; the limit is 64"):
        convert.request(wire, Route.LOCAL)


def test_parts_and_memory_survive_the_round_trip() -> None:
    first = SequenceOutput(ID, 0, [TokenOutput(1)])
    for part in (
        KvPart(ID, 0, [4, 5], blocks(2**256 - 1, 0), 128, False),
        KvPart(ID, 2, [], [], 128, True, first),
        KvPart(ID, 2, [], [], 128, True, first, (7, 0, 7)),
    ):
        assert convert.core_part(ID, convert.wire_part(part)) == part
    many = convert.wire_part(KvPart(ID, 2, [], [], 128, True, first, (7, 0, 7, 1, 2)))
    assert convert.core_part(ID, many).drafts == (7, 0, 7)
    handle = MemoryHandle("nixl", "agent", b"\0\1", 2**63, 4096, 10, 1, "VRAM")
    assert convert.core_memory(convert.wire_memory(handle)) == handle


def test_every_field_of_load_is_on_the_wire() -> None:
    counts = {"drafted": [9, 5, 1], "accepted": [7, 2, 0], "expert_imbalance": [1.5, 1.25], "paused": True}
    values = {name: index for index, name in enumerate(Load.__struct_fields__, 1)} | counts
    sent = convert.wire_load(Load(**values))
    assert {field.name: value for field, value in sent.ListFields()} == values


@pytest.mark.parametrize("kind", list(GrammarKind))
@pytest.mark.parametrize("after", [None, 0, 7])
def test_grammars(kind: GrammarKind, after: int | None) -> None:
    wire = common_pb2.SamplingParams(max_tokens=1, grammar={kind: "text", "after_token_id": after})
    assert convert.sampling_params(wire).grammar == Grammar(kind, "text", after)
    assert set(GrammarKind) == {field.name for field in common_pb2.Grammar.DESCRIPTOR.oneofs_by_name["kind"].fields}
    wire.grammar.MergeFrom(common_pb2.Grammar(marks=["<a>"], forbidden_before=[3]))
    assert convert.sampling_params(wire).grammar == Grammar(kind, "text", after, (3,), ("<a>",))
    for more, words in (({"marks": ["a"] * 9}, "marks has 9"), ({"marks": [""]}, "marks has 0 characters"),
                        ({"forbidden_before": [0] * 9}, "forbidden_before has 9")):  # fmt: skip
        with pytest.raises(MillraceError, match=words):
            convert.sampling_params(common_pb2.SamplingParams(max_tokens=1, grammar={kind: "text", **more}))
    with pytest.raises(MillraceError, match="grammar has no kind"):
        convert.sampling_params(common_pb2.SamplingParams(max_tokens=1, grammar={}))
