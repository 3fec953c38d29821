"""A real server with a small Inference service, and a channel to it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc
import pytest
from millrace.v1 import inference_pb2, inference_pb2_grpc
from millrace_rpc.client import channel
from millrace_rpc.server import Server

NAME = "millrace.v1.Inference"


@dataclass
class Inference(inference_pb2_grpc.InferenceServicer):
    """Raises `error`, if set: in Tokenize, and in Generate after one response. Else Generate never ends."""

    error: Exception | None = None
    closed: asyncio.Event = field(default_factory=asyncio.Event)  # Generate's clean-up has run

    async def Tokenize(
        self, request: inference_pb2.TokenizeRequest, context: grpc.aio.ServicerContext
    ) -> inference_pb2.TokenizeResponse:
        if self.error:
            raise self.error
        return inference_pb2.TokenizeResponse(token_ids=[1, 2])

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[inference_pb2.GenerateResponse]:
        try:
            yield inference_pb2.GenerateResponse(text="first")
            if self.error:
                raise self.error
            while True:
                yield inference_pb2.GenerateResponse(text="x" * 65536)
        finally:
            self.closed.set()


@dataclass
class Running:
    server: Server
    service: Inference
    channel: grpc.aio.Channel
    stub: inference_pb2_grpc.InferenceStub


@pytest.fixture
async def running() -> AsyncIterator[Running]:
    server, service = Server([NAME]), Inference()
    inference_pb2_grpc.add_InferenceServicer_to_server(service, server.grpc)
    port = await server.start("127.0.0.1:0")
    async with channel(f"127.0.0.1:{port}") as ch:
        yield Running(server, service, ch, inference_pb2_grpc.InferenceStub(ch))
    await server.stop(0)
