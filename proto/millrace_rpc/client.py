"""Client channels with the options that our servers expect, and the errors of calls on them."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

import grpc
from millrace_common.reasons import Reason

from millrace_rpc.errors import MillraceError, from_rpc_error
from millrace_rpc.server import KEEPALIVE, MAX_MESSAGE_BYTES
from millrace_rpc.tls import Identity

T = TypeVar("T")

SLICES = 4  # of a silence, see `heard_within`
CHANNEL_OPTIONS = [
    *KEEPALIVE,
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 5_000),  # of one attempt, a TLS handshake with a busy peer included
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # not 30 s: replaced processes have other addresses
]
RETRIED = {  # a call is repeated at another router as long as no part of its answer has come
    "maxAttempts": 5,
    "initialBackoff": "0.1s",
    "maxBackoff": "2s",
    "backoffMultiplier": 2,
    "retryableStatusCodes": ["UNAVAILABLE"],
}
SPREAD = {
    "loadBalancingConfig": [{"round_robin": {}}],
    "healthCheckConfig": {"serviceName": ""},  # a draining router reports NOT_SERVING
    "methodConfig": [{"name": [{"service": "millrace.v1.Inference"}], "retryPolicy": RETRIED}],
}


def channel(
    address: str, identity: Identity | None = None, token: str = "", *, proxy: bool = False
) -> grpc.aio.Channel:
    """Open a connection to `address` that no other channel of the process shares, so that its failures are its own.
    Plain without an identity, else TLS with the certificates that the identity has now. Every call sends the token
    (access.py).

    Call credentials need TLS, and an interceptor replaces the objects of calls; so the callables send it.

    Args:
        proxy: it goes through the proxy that the environment names, if any. Our own processes are never behind one.
    """
    made = _channel(address, identity, [*CHANNEL_OPTIONS, ("grpc.enable_http_proxy", int(proxy))])
    for kind in ("unary_unary", "unary_stream", "stream_unary", "stream_stream") if token else ():
        setattr(made, kind, _sending(getattr(made, kind), token))
    return made


Made = Callable[..., Any]  # by a channel: calls, and what makes them; grpc has no types


def _sending(make: Made, token: str) -> Made:
    """Of a method of a channel: its callables send the token."""

    def made(*arguments: object, **named: object) -> Made:
        begin = make(*arguments, **named)

        def call(*arguments: object, metadata: Sequence[tuple[str, str]] | None = None, **named: object) -> object:
            return begin(*arguments, metadata=(*(metadata or ()), ("authorization", token)), **named)

        return call

    return made


def routers(target: str, identity: Identity | None = None) -> grpc.aio.Channel:
    """Open a channel to all routers that `target` names, for clients of the Inference service:
    `dns:///millrace-routers:50051`, `ipv4:10.0.0.1:50051,10.0.0.2:50051`. Calls go round. A draining router gets no new
    calls, and a call that fails with UNAVAILABLE before any output is repeated elsewhere: routers can be replaced
    without a failed request.
    """
    config = json.dumps(SPREAD)
    kept = ("grpc.per_rpc_retry_buffer_size", MAX_MESSAGE_BYTES)  # a call whose request is larger is not retried
    return _channel(target, identity, [*CHANNEL_OPTIONS, ("grpc.service_config", config), kept])


def _channel(target: str, identity: Identity | None, options: Sequence[tuple[str, int | str]]) -> grpc.aio.Channel:
    if identity is None:
        return grpc.aio.insecure_channel(target, options=options)
    if identity.tls.server_name:
        options = [*options, ("grpc.ssl_target_name_override", identity.tls.server_name)]
    return grpc.aio.secure_channel(target, identity.channel_credentials(), options=options)


async def reply(call: Awaitable[T]) -> T:
    """The result of a unary call, or of a read or a write on a stream. Raises MillraceError when it fails.

    A closed channel is WORKER_LOST: gRPC reports it to the waiting task as if the task itself were cancelled.
    """
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise MillraceError(Reason.WORKER_LOST, "the connection was lost before the answer came") from None


async def heard_within(silence_s: float, reading: Coroutine[object, object, T]) -> T:
    """The result of a stream's `read()`. Raises TimeoutError when the peer was silent for so long, which ends the call.

    The time is counted in slices, so a pause of this process counts as one slice at most.
    """
    read = asyncio.create_task(reading)
    try:
        for _ in range(SLICES):
            done, _ = await asyncio.wait({read}, timeout=silence_s / SLICES)
            if done:
                return read.result()
        raise TimeoutError
    finally:
        read.cancel()
