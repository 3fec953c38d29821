"""The clients of `bench router`. Each function runs in a process of its own, on one event loop, and returns plain
numbers: a client that shares its loop with others would measure its own delays.

Load (`streams`, `one_by_one`) reads frames or lines and parses next to nothing, so that it leaves the machine to the
routers. What measures times (`probe`, `timed`, `direct`) speaks gRPC as every client does, with its library.
"""

import asyncio
import contextlib
import functools
import itertools
import json
import secrets
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

import grpc
from millrace.v1 import (
    common_pb2,
    inference_pb2,
    inference_pb2_grpc,
    prefill_pb2,
    prefill_pb2_grpc,
    worker_pb2,
    worker_pb2_grpc,
)
from millrace_common.tls_config import Tls
from millrace_rpc.client import channel
from millrace_rpc.server import run
from millrace_rpc.tls import Identity

from millrace_bench import frames
from millrace_bench.fake_worker import CLOCK_S, identity_in
from millrace_bench.router_system import client_context

CONNECTIONS = 4  # HTTP/2 allows about 100 streams on one
METHOD = "/millrace.v1.Inference/Generate"


@dataclass(frozen=True, slots=True)
class Work:
    api: str
    address: str  # of a router
    prompt_tokens: int
    tls: Path | None = None  # folder with certificates

    def channel(self) -> grpc.aio.Channel:
        return channel(self.address, Identity(Tls(ca=self.tls / "ca.crt")) if self.tls else None)

    @property
    def prompt(self) -> list[int]:
        return [10 + i % 200 for i in range(self.prompt_tokens)]


@dataclass(slots=True)
class Got:
    """Of one stream. Times are of time.perf_counter(), which all processes of a machine share."""

    start: float
    first: float = 0.0
    last: float = 0.0
    messages: int = 0
    latencies: list[float] = field(default_factory=list)  # of tokens, from the worker to us


Read = Callable[[int], Awaitable[Got]]
P = ParamSpec("P")
T = TypeVar("T")


def on_a_loop(load: Callable[P, Coroutine[object, object, T]]) -> Callable[P, T]:
    """Of its own."""
    return functools.wraps(load)(lambda *args, **named: run(load(*args, **named)))


def start(all_started: threading.Barrier) -> None:
    """A process begins, and has imported what it needs."""
    all_started.wait()


@on_a_loop
async def streams(work: Work, count: int, tokens: int) -> list[Got]:
    """So many at once."""
    async with _clients(work) as read:
        return await asyncio.gather(*(read(tokens) for _ in range(count)))


@on_a_loop
async def one_by_one(work: Work, clients: int, requests: int) -> list[Got]:
    """`clients` that send one request for one token after the other, `requests` in all."""
    left = iter(range(requests))
    async with _clients(work) as read:

        async def client() -> list[Got]:
            return [await read(1) for _ in left]

        return [got for found in await asyncio.gather(*(client() for _ in range(clients))) for got in found]


@on_a_loop
async def probe(work: Work, requests: int) -> list[float]:
    """Seconds to the first token of requests for one token, one after the other."""
    async with work.channel() as ch:
        stub = inference_pb2_grpc.InferenceStub(ch)
        grpc_read = functools.partial(_probe, stub, work.prompt)
        read = grpc_read if work.api == "grpc" else functools.partial(_read_http, work, 1)
        found = [await read() for _ in range(requests)]
        return [got.first - got.start for got in found]


@on_a_loop
async def timed(work: Work, tokens: int) -> Got:
    """One gRPC stream, with the time that each of its tokens took from the worker to here."""
    async with work.channel() as ch:
        got = Got(time.perf_counter())
        async for response in inference_pb2_grpc.InferenceStub(ch).Generate(_request(work.prompt, tokens, True)):
            now = time.perf_counter()
            got.latencies += [(now - entry.sampled.logprob) % CLOCK_S for entry in response.logprobs]
        return got


@on_a_loop
async def direct(prefill: str, work: Work, requests: int) -> list[float]:
    """Seconds to a prompt's first token on a Link of our own: what is left when the router is taken away."""
    async with _link(prefill, identity_in(work.tls) if work.tls else None) as link:
        return [await _first_token(link, work.prompt) for _ in range(requests)]


# ------------------------------------------------------------------------------------- gRPC


@contextlib.asynccontextmanager
async def _clients(work: Work) -> AsyncIterator[Read]:
    if work.api == "http":
        yield lambda tokens: _read_http(work, tokens)
        return
    connections = [await frames.connect(work.address, METHOD, client_context(work.tls)) for _ in range(CONNECTIONS)]
    turn = itertools.cycle(connections)
    yield lambda tokens: _read(next(turn), work.prompt, tokens)
    for connection in connections:
        connection.close()


async def _read(connection: frames.Connection, prompt: list[int], tokens: int) -> Got:
    start = time.perf_counter()
    call = await connection.call(_request(prompt, tokens, False).SerializeToString())
    count = inference_pb2.GenerateResponse.FromString(call.last).usage.completion_tokens
    if count != tokens:
        raise SystemExit(f"a stream ended after {count} of {tokens} tokens")
    return Got(start, call.first, time.perf_counter(), call.messages)


async def _probe(stub: inference_pb2_grpc.InferenceStub, prompt: list[int]) -> Got:
    got = Got(time.perf_counter())
    async for _ in stub.Generate(_request(prompt, 1, False)):
        got.first = got.first or time.perf_counter()
    return got


def _request(prompt: list[int], tokens: int, logprobs: bool) -> inference_pb2.GenerateRequest:
    sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
    if logprobs:
        sampling.logprobs = 0
    return inference_pb2.GenerateRequest(prompt={"token_ids": {"ids": prompt}}, sampling=sampling)


# ------------------------------------------------------------------------------------- HTTP


async def _read_http(work: Work, tokens: int) -> Got:
    """On a connection of its own, without an HTTP library: the client must not cost more than the router."""
    host, _, port = work.address.rpartition(":")
    body = json.dumps({"prompt": work.prompt, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    got = Got(time.perf_counter())
    reader, writer = await asyncio.open_connection(host, int(port), ssl=client_context(work.tls))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
    end = b""
    while b"data: [DONE]" not in end:
        data = await reader.read(1 << 16)
        if not data:
            raise SystemExit(f"a stream broke off: {end!r}")
        got.first = got.first or time.perf_counter()
        got.messages += data.count(b"data: {")
        end = end[-16:] + data
    got.last = time.perf_counter()
    writer.close()
    return got


# ------------------------------------------------------------------------------------- without the router


@contextlib.asynccontextmanager
async def _link(address: str, identity: Identity | None) -> AsyncIterator[grpc.aio.StreamStreamCall]:
    async with channel(address, identity) as ch:
        info = await worker_pb2_grpc.WorkerServiceStub(ch).GetInfo(worker_pb2.GetInfoRequest())
        link = prefill_pb2_grpc.PrefillServiceStub(ch).Link()
        hello = worker_pb2.LinkHello(router_id="bench", epoch=info.epoch)
        await link.write(prefill_pb2.PrefillLinkRequest(hello=hello))
        await link.read()
        yield link
        link.cancel()


async def _first_token(link: grpc.aio.StreamStreamCall, prompt: list[int]) -> float:
    start = time.perf_counter()
    request = worker_pb2.EngineRequest(
        id={"room": secrets.randbits(63)}, token_ids=prompt, sampling={"max_tokens": 1, "seed": 0}
    )
    await link.write(prefill_pb2.PrefillLinkRequest(submit={"request": request}))
    await link.read()
    return time.perf_counter() - start
