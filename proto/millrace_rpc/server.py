"""The gRPC server of every process: asyncio, health, reflection, and errors from the one table."""

import abc
import asyncio
import contextlib
import functools
import json
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from millrace_common.reasons import Reason

from millrace_rpc.errors import MillraceError
from millrace_rpc.health import NOT_SERVING, SERVING, Health
from millrace_rpc.tls import Identity

log = logging.getLogger(__name__)
T = TypeVar("T")

MAX_MESSAGE_BYTES = 16 << 20
MAX_METADATA_BYTES = 8 << 10  # of a call's headers
KEEPALIVE = [
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
]
SERVER_OPTIONS = [
    *KEEPALIVE,
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", 2 * MAX_METADATA_BYTES),  # above the soft limit calls are refused at random
    ("grpc.so_reuseport", 0),
]
LIVENESS = "liveness"  # the health service's name for the process itself: serving for as long as it answers
HEALTH = "grpc.health.v1.Health"


class Server:
    """`add` services with the generated `add_XServicer_to_server`, then `start`; `port` is the bound port. Further
    interceptors may raise MillraceErrors from the handlers that they wrap.
    """

    def __init__(
        self,
        service_names: Sequence[str],
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        options: Sequence[tuple[str, int]] = (),
    ) -> None:
        self.grpc = grpc.aio.server(interceptors=[_Errors(), *interceptors], options=[*SERVER_OPTIONS, *options])
        self.health = Health()
        self._names = service_names
        self._plain: grpc.aio.Server | None = None
        self.port = 0
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self.grpc)
        reflection.enable_server_reflection([*service_names, HEALTH, reflection.SERVICE_NAME], self.grpc)

    async def start(self, address: str, identity: Identity | None = None) -> int:
        """Bind `host:port` (port 0: any free one), with TLS if there is an identity. `set_serving` comes later."""
        self.set_serving(False)
        self.port = await _start(self.grpc, address, identity)
        return self.port

    async def start_health(self, address: str) -> int:
        """Answer the same health checks, and nothing else, on a plain port of their own, for probes without TLS. Call
        it before `start`, so that a slow start is visible.
        """
        self._plain = grpc.aio.server(options=SERVER_OPTIONS)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._plain)
        self.set_serving(False)
        return await _start(self._plain, address, None)

    def set_serving(self, serving: bool) -> None:
        """Readiness of every service. Liveness is the process answering health checks at all."""
        self.health.set([LIVENESS], SERVING)
        self.health.set(["", *self._names], SERVING if serving else NOT_SERVING)

    async def stop(self, grace_s: float) -> None:
        await self.grpc.stop(grace_s)
        if self._plain is not None:
            await self._plain.stop(0)


async def _start(server: grpc.aio.Server, address: str, identity: Identity | None) -> int:
    """The bound port."""
    try:
        if identity is None:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, identity.server_credentials())
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from error
    await server.start()
    return int(port)


Behavior = Callable[..., Any]  # a method of a servicer; grpc has no types
Check = Callable[[Any], Any]  # of a request, or of a stream of requests


class Interceptor(grpc.aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Wraps the handlers of our own services; health and reflection stay as they are."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler:
        handler = await continuation(details)
        if handler is None or not details.method.startswith("/millrace."):
            return handler
        return self.wrap(handler, details)

    @abc.abstractmethod
    def wrap(self, handler: grpc.RpcMethodHandler, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        """The handler to call instead."""


class _Errors(Interceptor):
    """Turns exceptions of handlers into statuses, and malformed requests, which gRPC would answer with INTERNAL."""

    def wrap(self, handler: grpc.RpcMethodHandler, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        check = _each if handler.request_streaming else _well_formed
        wrapped = _streaming if handler.response_streaming else _unary
        parse = handler.request_deserializer and functools.partial(_parse, handler.request_deserializer)
        return rebuilt(handler, lambda behavior: wrapped(behavior, check), parse)


def preceded(
    handler: grpc.RpcMethodHandler, act: Callable[[grpc.aio.ServicerContext], object]
) -> grpc.RpcMethodHandler:
    """The handler with something to do before each call, in its task. What that raises ends the call."""

    def wrap(behavior: Behavior) -> Behavior:
        def call(request: object, context: grpc.aio.ServicerContext) -> object:
            act(context)
            return behavior(request, context)

        return call

    return rebuilt(handler, wrap)


def rebuilt(
    handler: grpc.RpcMethodHandler, wrap: Callable[[Behavior], Behavior], parse: Callable[[bytes], object] | None = None
) -> grpc.RpcMethodHandler:
    """The handler with another behaviour, made of its own, and perhaps with another parser of requests."""
    kinds = ["stream" if many else "unary" for many in (handler.request_streaming, handler.response_streaming)]
    kind = "_".join(kinds)  # the name of the handler's one behaviour
    make = getattr(grpc, f"{kind}_rpc_method_handler")
    return make(wrap(getattr(handler, kind)), parse or handler.request_deserializer, handler.response_serializer)


def parse(deserializer: Callable[[bytes], T], data: bytes) -> T:
    """The message in `data`. Raises MillraceError (INVALID_ARGUMENT)."""
    return _well_formed(_parse(deserializer, data))


def _parse(deserializer: Callable[[bytes], T], data: bytes) -> T | MillraceError:
    """An error is handed on: where gRPC calls this, it must not raise."""
    try:
        return deserializer(data)
    except DecodeError as error:  # which names the type
        text = f"the request is not well-formed (strings must be valid UTF-8): {error}"
        return MillraceError(Reason.INVALID_ARGUMENT, text)


def _well_formed(request: T | MillraceError) -> T:
    if isinstance(request, MillraceError):
        raise request
    return request


async def _each(requests: AsyncIterator[T | MillraceError]) -> AsyncIterator[T]:
    async for request in requests:
        yield _well_formed(request)


def _unary(behavior: Behavior, check: Check) -> Behavior:
    async def call(request: object, context: grpc.aio.ServicerContext) -> object:
        try:
            return await behavior(check(request), context)
        except Exception as error:
            await _abort(context, error)
            return None

    return call


def _streaming(behavior: Behavior, check: Check) -> Behavior:
    async def call(request: object, context: grpc.aio.ServicerContext) -> AsyncIterator[object]:
        try:
            async with contextlib.aclosing(behavior(check(request), context)) as responses:
                async for response in responses:
                    yield response
        except Exception as error:
            await _abort(context, error)

    return call


async def _abort(context: grpc.aio.ServicerContext, error: Exception) -> None:
    if isinstance(error, grpc.aio.AbortError):
        raise error
    status = MillraceError.of(error, log, "unexpected error in a handler").to_status()
    await context.abort(status.code, status.details, status.trailing_metadata)


def announce(path: Path, facts: Mapping[str, object]) -> None:
    """Write JSON for whoever started this process: bound ports and more. By a rename: no reader sees half a file."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    partial.write_text(json.dumps({**facts, "pid": os.getpid()}))
    partial.replace(path)


def run(main: Coroutine[object, object, T]) -> T:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)
