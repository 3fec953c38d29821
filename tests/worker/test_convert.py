import contextlib
import functools
import struct
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from google.protobuf.message_factory import GetMessageClass
from millrace.v1 import common_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_rpc.errors import TABLE, MillraceError
from millrace_serve.engine.core import (
    CachedTokens,
    Failure,
    FinishReason,
    Grammar,
    GrammarKind,
    KvChunk,
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
from msgspec.structs import replace

ID = RequestId(2**64 - 1, 3)


def wire(**sampling: object) -> worker_pb2.EngineRequest:
    params = common_pb2.SamplingParams(**{"max_tokens": 4, **sampling})
    return worker_pb2.EngineRequest(id=convert.attempt_id(ID), token_ids=[5, 6, 7], sampling=params)


def test_request_keeps_every_value_and_absent_ones_take_their_defaults() -> None:
    given = wire(temperature=0.0, top_k=0, seed=2**64 - 1, logit_bias={7: -1.5}, logprobs=0, stop_token_ids=[9])
    given.num_prior_outputs, given.priority, given.timeout_ms, given.keep_s = 1, -5, 1500, 300
    given.tpot_limit_ms, given.ttft_limit_ms = 40, 700
    request = convert.request(given, Route.IMPORT, 100)
    assert (request.id, list(request.token_ids), request.route) == (ID, [5, 6, 7], Route.IMPORT)
    assert (request.num_prior_outputs, request.priority, request.timeout_s, request.keep_s) == (1, -5, 1.5, 300)
    assert (request.tpot_limit_s, request.ttft_limit_s) == (0.04, 0.7)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed, sampling.logprobs) == (0.0, 1.0, 2**64 - 1, 0)
    assert (sampling.logit_bias, sampling.stop_token_ids) == ({7: -1.5}, (9,))
    assert (plain := convert.request(wire(), Route.LOCAL, 100)).timeout_s is None and plain.sampling.temperature == 1.0


def test_a_prompt_comes_packed_or_as_numbers() -> None:
    """Routers of an earlier version send numbers."""
    packed = worker_pb2.EngineRequest(prompt=struct.pack("<3I", 5, 6, 2**31))
    assert convert.token_ids(packed, 3).tolist() == [5, 6, 2**31]
    assert convert.token_ids(wire(), 3).tolist() == [5, 6, 7] and not convert.token_ids(worker_pb2.EngineRequest(), 3)
    with pytest.raises(MillraceError, match="prompt has 13 bytes; a token id has 4"):
        convert.token_ids(worker_pb2.EngineRequest(prompt=packed.prompt + b"x"), 3)


def test_a_room_is_needed() -> None:
    given = wire()
    given.id.Clear()
    with pytest.raises(MillraceError, match="room") as caught:
        convert.request(given, Route.LOCAL, 100)
    assert caught.value.reason is Reason.INVALID_ARGUMENT and caught.value.param == "room"


@pytest.mark.parametrize(
    "output",
    [
        SequenceOutput(ID, 0, [TokenOutput(1)], None, None, CachedTokens(128, 64, 63)),
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
    retry_after_ms = round(1000 * TABLE[reason].retry_after_s)
    assert (wire.reason, wire.message, wire.retry_after_ms) == (reason, "why", retry_after_ms)
    assert convert.core_failure(wire) == Failure(reason, "why")


def test_parts_and_memory_survive_the_round_trip() -> None:
    first = SequenceOutput(ID, 0, [TokenOutput(1)])
    for part in (
        KvChunk(ID, 0, [4, 5], blocks(2**256 - 1, 0), 128, False),
        KvChunk(ID, 2, [], [], 128, True, first),
        KvChunk(ID, 2, [], [], 128, True, replace(first, drafts=(7, 0, 7))),
    ):
        assert convert.core_chunk(ID, convert.wire_chunk(part)) == part
    many = convert.wire_chunk(KvChunk(ID, 2, [], [], 128, True, replace(first, drafts=(7, 0, 7, 1, 2))))
    assert convert.core_chunk(ID, many).first == replace(first, drafts=(7, 0, 7))
    handle = MemoryHandle("nixl", "agent", b"\0\1", 2**63, 4096, 10, 1, "VRAM")
    assert convert.core_memory(convert.wire_memory(handle)) == handle


def test_every_field_of_load_is_on_the_wire() -> None:
    counts = {"drafted": [9, 5, 1], "accepted": [7, 2, 0], "expert_imbalance": [1.5, 1.25], "paused": True}
    counts["counters"] = {"steps": 3.0, "host_bytes/load": 0.5}
    values = {name: index for index, name in enumerate(Load.__struct_fields__, 1)} | counts
    sent = convert.wire_load(Load(**{**values, "step_times": (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)}))
    values["step_times"] = worker_pb2.StepTimes(
        fixed_s=1.0, sequence_s=2.0, key_s=3.0, chunk_s=4.0, token_s=5.0, pair_s=6.0
    )
    assert {field.name: value for field, value in sent.ListFields()} | {"counters": dict(sent.counters)} == values


@pytest.mark.parametrize("kind", list(GrammarKind))
@pytest.mark.parametrize("after", [None, 0, 7])
def test_grammars(kind: GrammarKind, after: int | None) -> None:
    wire = common_pb2.SamplingParams(max_tokens=1, grammar={kind: "text", "after_token_id": after})
    assert convert.sampling_params(wire).grammar == Grammar(kind, "text", after)
    assert set(GrammarKind) == {field.name for field in common_pb2.Grammar.DESCRIPTOR.oneofs_by_name["kind"].fields}
    wire.grammar.MergeFrom(common_pb2.Grammar(marks=["<a>"], forbidden_before=[3]))
    assert convert.sampling_params(wire).grammar == Grammar(kind, "text", after, (3,), ("<a>",))
    with pytest.raises(MillraceError, match="grammar has no kind"):
        convert.sampling_params(common_pb2.SamplingParams(max_tokens=1, grammar={}))


def lists(message: Any, *names: str) -> Iterator[tuple[str, Callable[[Any, int], Any]]]:
    """Of a type: the path of each repeated field, and what makes a message with so many entries in it."""
    for field in message.DESCRIPTOR.fields:
        path = ".".join((*names, field.name))
        if field.message_type is not None and not field.is_repeated:
            yield from lists(GetMessageClass(field.message_type), *names, field.name)
        elif field.message_type is not None:
            yield path, lambda part, count, name=field.name: getattr(part, name).update(dict.fromkeys(range(count), 1))
        elif field.is_repeated:
            word = "x" if field.type == field.TYPE_STRING else 1
            yield path, lambda part, count, name=field.name, word=word: getattr(part, name).extend([word] * count)


LISTS = dict(lists(worker_pb2.EngineRequest))
MOST = {"token_ids": 100, "sampling.stop_token_ids": 64, "sampling.logit_bias": 1024}
MOST |= dict.fromkeys(("sampling.grammar.forbidden_before", "sampling.grammar.marks"), 8)


def test_every_list_of_a_request_is_counted_before_it_is_read() -> None:
    """A new one has to be counted, too."""
    assert set(LISTS) == set(MOST)
    for path, fill in LISTS.items():
        for more in (0, 1):
            wire = worker_pb2.EngineRequest()
            *parents, name = path.split(".")
            fill(functools.reduce(getattr, parents, wire), MOST[path] + more)
            with pytest.raises(MillraceError) if more else contextlib.nullcontext() as caught:
                convert.check_counts(wire.sampling)
                convert.token_ids(wire, MOST["token_ids"])
            if more:
                named = {"token_ids": "prompt"}.get(name, name)
                assert named in caught.value.message and str(MOST[path]) in caught.value.message
    with pytest.raises(MillraceError, match="prompt has 101 tokens; this engine has max_model_len=100"):
        convert.token_ids(worker_pb2.EngineRequest(prompt=bytes(404)), 100)
