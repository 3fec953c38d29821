"""The same bad input gets the same answer on gRPC and on HTTP, before any worker hears of it."""

import json
from typing import Any
from unittest.mock import Mock

import grpc
import pytest
from millrace.v1 import common_pb2, inference_pb2
from millrace_common.reasons import Reason
from millrace_router.apis.grpc import service as grpc_service
from millrace_router.apis.openai.chat import ChatRequest
from millrace_router.apis.openai.tokens import DetokenizeRequest, TokenizeRequest
from millrace_router.apis.openai.types import CompletionRequest, Strict, parse
from millrace_router.flow.validate import MORE_IDS
from millrace_rpc.errors import TABLE, MillraceError, from_rpc_error
from router.fake_worker import CONTEXT, DECODE, PREFILL, VOCAB, FakeWorker
from router.harness import Cluster

NAN, INF = float("nan"), float("inf")
INVALID, TOO_LONG = Reason.INVALID_ARGUMENT, Reason.CONTEXT_TOO_LONG
# What is wrong: (reason, param, JSON fields, GenerateRequest fields, SamplingParams fields)
BAD: dict[str, tuple[Reason, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "empty text": (INVALID, "prompt", {"prompt": ""}, {"prompt": {"text": ""}}, {}),
    "no tokens": (INVALID, "prompt", {"prompt": []}, {"prompt": {"token_ids": {"ids": []}}}, {}),
    "token range": (INVALID, "prompt[0]", {"prompt": [VOCAB]}, {"prompt": {"token_ids": {"ids": [VOCAB]}}}, {}),
    "long prompt": (
        TOO_LONG, "prompt", {"prompt": [1] * CONTEXT}, {"prompt": {"token_ids": {"ids": [1] * CONTEXT}}}, {},
    ),
    "long text": (TOO_LONG, "prompt", {"prompt": "x" * 9000}, {"prompt": {"text": "x" * 9000}}, {}),
    "long output": (TOO_LONG, "prompt", {"max_tokens": CONTEXT}, {}, {"max_tokens": CONTEXT}),
    "huge output": (TOO_LONG, "prompt", {"max_tokens": 2**32 - 1}, {}, {"max_tokens": 2**32 - 1}),
    "no output": (INVALID, "max_tokens", {"max_tokens": 0}, {}, {"max_tokens": 0}),
    "min over max": (
        INVALID, "min_tokens", {"max_tokens": 4, "min_tokens": 5}, {}, {"max_tokens": 4, "min_tokens": 5},
    ),
    "temperature below": (INVALID, "temperature", {"temperature": -0.5}, {}, {"temperature": -0.5}),
    "temperature above": (INVALID, "temperature", {"temperature": 101.0}, {}, {"temperature": 101.0}),
    "temperature nan": (INVALID, "temperature", {"temperature": NAN}, {}, {"temperature": NAN}),
    "temperature inf": (INVALID, "temperature", {"temperature": INF}, {}, {"temperature": INF}),
    "top_p zero": (INVALID, "top_p", {"top_p": 0.0}, {}, {"top_p": 0.0}),
    "top_p above": (INVALID, "top_p", {"top_p": 1.5}, {}, {"top_p": 1.5}),
    "min_p": (INVALID, "min_p", {"min_p": -0.25}, {}, {"min_p": -0.25}),
    "repetition": (INVALID, "repetition_penalty", {"repetition_penalty": 0.0}, {}, {"repetition_penalty": 0.0}),
    "presence": (INVALID, "presence_penalty", {"presence_penalty": 2.5}, {}, {"presence_penalty": 2.5}),
    "frequency": (INVALID, "frequency_penalty", {"frequency_penalty": NAN}, {}, {"frequency_penalty": NAN}),
    "logprobs": (INVALID, "logprobs", {"logprobs": 21}, {}, {"logprobs": 21}),
    "bias value": (INVALID, 'logit_bias["5"]', {"logit_bias": {"5": 101.0}}, {}, {"logit_bias": {5: 101.0}}),
    "bias nan": (INVALID, 'logit_bias["5"]', {"logit_bias": {"5": NAN}}, {}, {"logit_bias": {5: NAN}}),
    "bias token": (INVALID, 'logit_bias["900"]', {"logit_bias": {"900": 1.0}}, {}, {"logit_bias": {900: 1.0}}),
    "stop tokens": (INVALID, "stop_token_ids", {"stop_token_ids": [1] * 65}, {}, {"stop_token_ids": [1] * 65}),
    "stop token": (INVALID, "stop_token_ids[0]", {"stop_token_ids": [900]}, {}, {"stop_token_ids": [900]}),
    "stops": (INVALID, "stop", {"stop": ["x"] * 17}, {"stop": ["x"] * 17}, {}),
    "empty stop": (INVALID, "stop[1]", {"stop": ["x", ""]}, {"stop": ["x", ""]}, {}),
    "long stop": (INVALID, "stop[0]", {"stop": ["x" * 257]}, {"stop": ["x" * 257]}, {}),
    "n zero": (INVALID, "n", {"n": 0}, {"n": 0}, {}),
    "n above": (INVALID, "n", {"n": 17}, {"n": 17}, {}),
    "priority": (INVALID, "priority", {"priority": -101}, {"priority": -101}, {}),
    "model": (Reason.MODEL_NOT_FOUND, "model", {"model": "other"}, {"model": "other"}, {}),
}  # fmt: skip


async def grpc_error(made: Cluster, request: inference_pb2.GenerateRequest) -> MillraceError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in made.stub.Generate(request):
            pass
    error = from_rpc_error(caught.value)
    assert caught.value.code() is TABLE[error.reason].code
    return error


async def http_error(made: Cluster, path: str, body: bytes) -> tuple[int, dict[str, Any]]:
    answer = await made.http.post(path, content=body)
    return answer.status_code, answer.json()["error"]


async def test_a_bad_field_gets_the_same_answer_on_both(pair: Cluster) -> None:
    for name, (reason, param, fields, message_fields, sampling) in BAD.items():
        fields = {"model": "tiny", "prompt": "hello"} | fields
        values = {"prompt": {"text": "hello"}, "sampling": sampling} | message_fields
        by_grpc = await grpc_error(pair, inference_pb2.GenerateRequest(**values))
        status, by_http = await http_error(pair, "/v1/completions", json.dumps(fields).encode())
        assert (by_grpc.reason, by_grpc.param) == (reason, param), (name, by_grpc)
        assert by_http == by_grpc.http_body()["error"], name
        assert status == TABLE[reason].http, name
        assert param in by_grpc.message or reason is not INVALID, (name, by_grpc.message)
    assert not any(worker.submitted for worker in pair.workers)
    counted = [pair.metric("millrace_requests_total", api=api, status="invalid_argument") for api in ("grpc", "http")]
    assert counted[0] == counted[1] > 0


async def test_lists_over_grpc_are_counted_before_they_are_read(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_service, "to_ask", Mock(side_effect=AssertionError("they were read")))
    for param, fields in {
        "prompt": {"prompt": {"token_ids": {"ids": [1] * (CONTEXT + 1)}}},
        "prompt ": {"prompt": {"chat": {"messages": [{"role": "user"}] * (CONTEXT + 1)}}},
        "stop": {"stop": ["x"] * 17},
        "logit_bias": {"sampling": {"logit_bias": dict.fromkeys(range(1025), 1.0)}},
        "stop_token_ids": {"sampling": {"stop_token_ids": [1] * 65}},
    }.items():
        assert (await grpc_error(pair, inference_pb2.GenerateRequest(**fields))).param == param.strip()
    many = inference_pb2.DetokenizeRequest(token_ids=[1] * (MORE_IDS + 2 * CONTEXT + 1))
    with pytest.raises(grpc.aio.AioRpcError, match="token_ids must have at most"):
        await pair.stub.Detokenize(many)


async def test_a_malformed_body_is_refused_with_its_field(pair: Cluster) -> None:
    cases = {
        b"{": "not valid JSON",
        b'{"prompt": "x", "max_tokens": -1}': "max_tokens must be between 1 and",
        b'{"prompt": "x", "seed": -1}': "seed must be between 0 and",
        b'{"prompt": "x", "n": 1%s}' % (b"0" * 400): "n must be between 1 and",
        b'{"prompt": "x", "seed": 1%s}' % (b"0" * 400): "seed must be between 0 and",
        b'{"prompt": ["x", "y"]}': "must be one prompt",
        b'{"prompt": "x", "0": 1}': '["0"] is unknown or not supported',
        b'{"prompt": "x", "logit_bias": {"a": 1}}': "logit_bias.a is not a token id",
        b'{"prompt": "x", "logit_bias": {"5": 1, "05": 2}}': 'logit_bias["05"] is not a token id',
        b'{"prompt": "x", "logit_bias": {" 5": 1}}': 'logit_bias[" 5"] is not a token id',
        b'{"prompt": "x", "logit_bias": {"1_0": 1}}': 'logit_bias["1_0"] is not a token id',
        '{"prompt": "x", "logit_bias": {"٥": 1}}'.encode(): "is not a token id",
    }
    for body, words in cases.items():
        status, error = await http_error(pair, "/v1/completions", body)
        assert status == 400 and error["type"] == "invalid_request_error", body
        assert words in error["message"], (body, error["message"])
    assert pair.metric("millrace_requests_total", api="http", status="invalid_argument") == len(cases)


MANY = 5000


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (CompletionRequest, {"prompt": [{}] * MANY}),
        (CompletionRequest, {"prompt": "x"} | dict.fromkeys(map(str, range(MANY)), 1)),  # unknown fields
        (CompletionRequest, {"prompt": "x", "stop": [1] * MANY}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": ["x"] * MANY}),
        (ChatRequest, {"messages": [{}] * MANY}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{}] * MANY}]}),
        (ChatRequest, {"messages": [{"role": "user", "tool_calls": [{}] * MANY}]}),
        (ChatRequest, {"messages": [], "tools": [{}] * MANY}),
        (ChatRequest, {"messages": [], "chat_template_kwargs": {str(i): [] for i in range(MANY)}}),
        (TokenizeRequest, {"prompt": "x", "chat_template_kwargs": {str(i): 0 for i in range(17)}}),
        (DetokenizeRequest, {"tokens": ["x"] * MANY}),
    ],
)
def test_the_first_mistake_of_many_is_enough(kind: type[Strict], body: dict[str, Any]) -> None:
    """A few MiB of them would take gigabytes and minutes."""
    with pytest.raises(MillraceError) as caught:
        parse(kind, json.dumps(body).encode())
    assert caught.value.path[0] in body and caught.value.reason is INVALID
    assert caught.value.__cause__.error_count() < 10


async def test_a_malformed_message_is_refused(pair: Cluster) -> None:
    raw = inference_pb2.GenerateRequest(model="xx", prompt={"text": "hello"}).SerializeToString()
    for data in (raw.replace(b"xx", b"\xff\xfe"), b"\xff\xff\xff"):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in pair.public.unary_stream("/millrace.v1.Inference/Generate")(data):
                pass
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "UTF-8" in caught.value.details()


async def test_a_fault_of_ours_has_the_same_shape(pair: Cluster) -> None:
    pair.router.inference.tokenizer.decode = Mock(side_effect=ZeroDivisionError("a fault"))
    status, error = await http_error(pair, "/detokenize", b'{"tokens": [1]}')
    assert (status, error["code"], error["message"]) == (500, "internal", "ZeroDivisionError: a fault")


async def test_an_oversized_request_is_refused_on_both(cluster: Any) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), limits={"message_bytes": 1000})
    text = "x" * 2000
    by_grpc = await grpc_error(made, inference_pb2.GenerateRequest(prompt={"text": text}))
    body = json.dumps({"prompt": text}).encode()
    status, by_http = await http_error(made, "/v1/completions", body)
    assert by_grpc.reason is Reason.MESSAGE_TOO_LARGE and status == 413
    assert by_http["code"] == "message_too_large" and "limit is 1000" in by_http["message"]


async def test_an_expired_deadline_is_refused_on_both(pair: Cluster) -> None:
    status, error = await http_error(pair, "/v1/completions", b'{"prompt": "x", "timeout_s": 0}')
    assert status == 408 and error["code"] == "deadline_exceeded"
    assert not any(worker.submitted for worker in pair.workers)
    call = pair.stub.Generate(inference_pb2.GenerateRequest(prompt={"text": "x"}), timeout=0)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_deadline_may_be_as_far_as_one_likes(pair: Cluster) -> None:
    for timeout_s in ("1e10", "1e308", "Infinity"):
        body = f'{{"prompt": "x", "max_tokens": 2, "timeout_s": {timeout_s}}}'
        assert (await pair.http.post("/v1/completions", content=body)).status_code == 200, timeout_s
    assert (await pair.generate([1], timeout=60 * 86400.0)).error is None
    assert {request.timeout_ms for worker in pair.workers for request in worker.submitted} == {2**32 - 1}
    status, error = await http_error(pair, "/v1/completions", b'{"prompt": "x", "timeout_s": NaN}')
    assert status == 400 and error["param"] == "timeout_s" and "number of seconds" in error["message"]
    await pair.quiet()


async def test_tokenize_and_detokenize(pair: Cluster) -> None:
    tokens = await pair.stub.Tokenize(inference_pb2.TokenizeRequest(prompt={"text": "hello"}))
    bos = pair.router.inference.tokenizer.bos
    assert tokens.token_ids[0] == bos
    text = await pair.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids))
    assert text.text == "hello"
    kept = inference_pb2.DetokenizeRequest(token_ids=tokens.token_ids, keep_special_tokens=True)
    assert (await pair.stub.Detokenize(kept)).text == "<｜begin｜>hello"
    (model,) = (await pair.stub.ListModels(inference_pb2.ListModelsRequest())).models
    assert (model.name, model.max_context, model.vocab_size) == ("tiny", CONTEXT, VOCAB)
    for call in (
        pair.stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[VOCAB])),
        pair.stub.Tokenize(inference_pb2.TokenizeRequest()),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_resolved_parameters_reach_both_workers(pair: Cluster) -> None:
    await pair.generate([5, 6], sampling={"temperature": 0.5, "logit_bias": {7: -3.0}, "max_tokens": 4}, priority=3)
    (prefill,), (decode,) = pair.prefills[0].submitted, pair.decodes[0].submitted
    assert prefill.sampling == decode.sampling
    assert prefill.sampling.temperature == 0.5 and prefill.sampling.logit_bias == {7: -3.0} and prefill.priority == 3
    await pair.generate([5, 6], sampling={"max_tokens": 1})
    request = inference_pb2.GenerateRequest(prompt={"token_ids": {"ids": [5, 6]}}, stop=["a", "b", "c", "d"])
    async for _ in pair.stub.Generate(request):
        pass
    last = pair.prefills[0].submitted[-1].sampling
    assert last.max_tokens == CONTEXT - 2 and last.HasField("seed")
    assert not common_pb2.SamplingParams().HasField("seed")
