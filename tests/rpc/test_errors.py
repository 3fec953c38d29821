"""The error table, and errors on their way through a real server."""

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from millrace.v1 import inference_pb2
from millrace_common.quoted import printable
from millrace_common.reasons import Reason
from millrace_rpc.errors import DOMAIN, TABLE, MillraceError, from_rpc_error


async def error_of_unary(running) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub.Tokenize(inference_pb2.TokenizeRequest())
    return caught.value


async def error_of_stream(running) -> grpc.aio.AioRpcError:
    texts = []
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for response in running.stub.Generate(inference_pb2.GenerateRequest()):
            texts.append(response.text)
    assert texts == ["first"], "what came before the error must arrive"
    return caught.value


BOTH = pytest.mark.parametrize("call", [error_of_unary, error_of_stream])


@pytest.mark.parametrize("reason", Reason)
def test_rows_are_consistent(reason: Reason) -> None:
    row = TABLE[reason]
    assert row.code is not grpc.StatusCode.OK
    assert 400 <= row.http <= 599
    if row.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        assert row.http == 429
        assert row.retry_after_s > 0, "a refused client must be told when to come back"
    if row.code is grpc.StatusCode.INVALID_ARGUMENT:
        assert row.http < 500
        assert not row.retry_elsewhere, "a bad request is bad everywhere"


@BOTH
@pytest.mark.parametrize("reason", Reason)
async def test_an_error_of_every_reason_survives_the_wire(running, call, reason: Reason) -> None:
    running.service.error = MillraceError(reason, "größer als erlaubt", param="sampling.top_p", retry_after_s=2.5)
    raw = await call(running)
    assert raw.code() is TABLE[reason].code
    error = from_rpc_error(raw)
    assert (error.reason, error.message, error.param) == (reason, "größer als erlaubt", "sampling.top_p")
    assert error.retry_after_s == 2.5


@BOTH
async def test_details_are_those_of_google_rpc(running, call) -> None:
    running.service.error = MillraceError(Reason.QUEUE_FULL, "1024 requests wait already")
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    details: list[any_pb2.Any] = list(rpc_status.from_call(await call(running)).details)
    assert details[0].Unpack(info)
    assert details[1].Unpack(retry)
    assert (info.domain, info.reason) == (DOMAIN, "QUEUE_FULL")
    assert retry.retry_delay.ToMilliseconds() == 1000


async def test_no_retry_info_without_advice(running) -> None:
    running.service.error = MillraceError(Reason.INVALID_ARGUMENT, "no")
    details = rpc_status.from_call(await error_of_unary(running)).details
    assert not any(detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR) for detail in details)


@BOTH
async def test_unexpected_error_is_internal_and_named(running, call) -> None:
    running.service.error = ZeroDivisionError("by zero")
    error = from_rpc_error(await call(running))
    assert (error.reason, error.message) == (Reason.INTERNAL, "ZeroDivisionError: by zero")


@pytest.mark.parametrize("message", ["x" * 100_000, "ü" * 100_000, "line\nbreak", "\udc80 lone surrogate", ""])
async def test_any_message_survives_the_headers(running, message: str) -> None:
    running.service.error = MillraceError(Reason.INVALID_ARGUMENT, message, param="prompt")
    error = from_rpc_error(await error_of_unary(running))
    assert (error.reason, error.param) == (Reason.INVALID_ARGUMENT, "prompt")
    if message:
        assert error.message.startswith(printable(message[:4]))


async def test_statuses_of_others_get_the_nearest_reason(running) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await running.stub.Detokenize(inference_pb2.DetokenizeRequest())  # not implemented by the service
    assert from_rpc_error(caught.value).reason is Reason.INTERNAL
    await running.server.stop(0)
    assert from_rpc_error(await error_of_unary(running)).reason is Reason.WORKER_LOST


def test_a_stream_that_grpc_calls_broken_is_tried_again() -> None:
    nothing = grpc.aio.Metadata()
    error = grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, details="Internal error from Core")
    found = from_rpc_error(error)
    assert found.reason is Reason.TRANSFER_FAILED and found.row.retry_elsewhere


def test_unknown_reason_of_a_newer_peer_is_internal() -> None:
    assert MillraceError("FROM_THE_FUTURE", "x").reason is Reason.INTERNAL
