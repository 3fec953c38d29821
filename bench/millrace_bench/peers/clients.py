"""The clients of `peers/router.py`, the same for every router, each in a process of its own: `Load` keeps streams
running and counts their tokens; `latencies` and `first_tokens` measure times.
"""

import asyncio
import itertools
import json
import multiprocessing
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol, Self, TypeVar, cast

from millrace.v1 import common_pb2, inference_pb2

from millrace_bench import frames
from millrace_bench.fake_worker import CLOCK_S
from millrace_bench.peers.sse_worker import TEXT
from millrace_bench.router_load import CONNECTIONS, METHOD, on_a_loop

Api = Literal["http", "grpc"]
FOREVER = 100_000  # tokens
COUNT_S, START_S = 0.05, 60.0
AT_ONCE = 64  # requests without a token
PROMPT = "The mill stands beside the river. " * 40  # about a thousand characters


class Timed(Protocol):
    @property
    def first(self) -> float:
        """When the first token came, 0 before."""


S = TypeVar("S", bound=Timed)


@dataclass(frozen=True, slots=True)
class Target:
    api: Api
    address: str
    model: str


class Load:
    """`streams` that never end, in a process that ends with the context."""

    def __init__(self, target: Target, streams: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._streams = streams
        self._counts = context.Array("d", 3)  # streams that have begun, tokens so far, when they were counted
        self._process = context.Process(target=_load, args=(target, streams, self._counts), daemon=True)

    async def __aenter__(self) -> Self:
        """All streams have begun. Raises TimeoutError, or RuntimeError when the clients could not go on."""
        self._process.start()
        try:
            async with asyncio.timeout(START_S):
                while self._counts[0] < self._streams:
                    if not self._process.is_alive():
                        raise RuntimeError("the clients ended early")
                    await asyncio.sleep(COUNT_S)
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._end()

    def tokens(self) -> tuple[float, float]:
        """Number so far, and the time of that number in seconds."""
        with self._counts.get_lock():
            return self._counts[1], self._counts[2]

    def _end(self) -> None:
        self._process.kill()
        self._process.join()


@on_a_loop
async def _load(target: Target, streams: int, counts: Any) -> None:
    opened = await (_grpc_streams if target.api == "grpc" else _http_streams)(target, streams)
    while True:
        if any(one.ended.done() for one in opened):
            raise SystemExit("a stream ended early")
        tokens = [one.tokens for one in opened]
        with counts.get_lock():
            counts[:] = [sum(map(bool, tokens)), sum(tokens), time.perf_counter()]
        await asyncio.sleep(COUNT_S)


@on_a_loop
async def latencies(target: Target, seconds: float) -> list[float]:
    """Seconds that each token of one stream takes from the worker to here."""
    stream = await (_grpc_stream if target.api == "grpc" else _http_stream)(target, FOREVER, True)
    await asyncio.sleep(seconds)
    if stream.ended.done():
        raise SystemExit("a stream ended early")
    return stream.latencies


@on_a_loop
async def first_tokens(target: Target, requests: int) -> list[float]:
    """Seconds to the first token of requests for one token, one after the other."""
    begin, found = _grpc_stream if target.api == "grpc" else _http_stream, []
    for _ in range(requests):
        start = time.perf_counter()
        stream = await begin(target, 1, False)
        await stream.ended
        found.append(stream.first - start)
    return found


async def _one_after_another(begin: Callable[[], Awaitable[S]], count: int) -> list[S]:
    """At most AT_ONCE wait for their first tokens, so that no queue is full."""
    opened: list[S] = []
    for _ in range(count):
        while len(opened) >= AT_ONCE and not opened[-AT_ONCE].first:
            await asyncio.sleep(COUNT_S / 10)
        opened.append(await begin())
    return opened


# ------------------------------------------------------------------------------------- HTTP


class HttpStream(asyncio.Protocol):
    """One request on a connection of its own, read without a library, which would cost more than the router."""

    def __init__(self, request: bytes, timed: bool) -> None:
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.first = 0.0  # when the first token came
        self.tokens = 0
        self.latencies: list[float] = []
        self._request = request
        self._timed = timed
        self._received = self._in_body = self._line = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        cast("asyncio.Transport", transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        now, tokens = time.perf_counter(), data.count(TEXT.encode())
        if tokens and not self.first:
            self.first = now
        self.tokens += tokens
        if b"data: [DONE]" in data and not self.ended.done():
            self.ended.set_result(None)
        if self._timed:
            self._received += data
            for line in self._body().split(b"\n"):
                if line.startswith(b"data: {"):
                    content = json.loads(line[6:])["choices"][0]["logprobs"]["content"]
                    self.latencies += [(now - entry["logprob"]) % CLOCK_S for entry in content]

    def _body(self) -> bytes:
        """Whole lines of the body that have come. A gateway may cut it into other chunks than the worker."""
        if not self._in_body and b"\r\n\r\n" in self._received:
            _, self._in_body, self._received = self._received.partition(b"\r\n\r\n")
        while self._in_body:
            size, complete, rest = self._received.partition(b"\r\n")
            end = int(size, 16) if complete else len(rest)
            if len(rest) < end + 2:
                break
            self._line, self._received = self._line + rest[:end], rest[end + 2 :]
        lines, _, self._line = self._line.rpartition(b"\n")
        return lines

    def connection_lost(self, error: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_exception(ConnectionError(f"a stream broke off: {error}"))


async def _http_stream(target: Target, tokens: int, timed: bool) -> HttpStream:
    host, _, port = target.address.rpartition(":")
    body = {"model": target.model, "messages": [{"role": "user", "content": PROMPT}], "stream": True}
    body |= {"max_tokens": tokens, "ignore_eos": True} | ({"logprobs": True, "top_logprobs": 0} if timed else {})
    data = json.dumps(body).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(data)}\r\n"
    request = head.encode() + b"content-type: application/json\r\n\r\n" + data
    _, stream = await asyncio.get_running_loop().create_connection(lambda: HttpStream(request, timed), host, int(port))
    return stream


async def _http_streams(target: Target, count: int) -> list[HttpStream]:
    return await _one_after_another(lambda: _http_stream(target, FOREVER, False), count)


# ------------------------------------------------------------------------------------- gRPC


class GrpcStream:
    def __init__(self, call: frames.Call, timed: bool) -> None:
        self._call = call
        self.ended = call.ended
        self.latencies: list[float] = []
        if timed:
            call.on_message = self._note

    @property
    def first(self) -> float:
        return self._call.first

    @property
    def tokens(self) -> int:
        return inference_pb2.GenerateResponse.FromString(self._call.last).usage.completion_tokens

    def _note(self, message: bytes) -> None:
        now = time.perf_counter()
        entries = inference_pb2.GenerateResponse.FromString(message).logprobs
        self.latencies += [(now - entry.sampled.logprob) % CLOCK_S for entry in entries]


async def _grpc_stream(target: Target, tokens: int, timed: bool) -> GrpcStream:
    connection = await frames.connect(target.address, METHOD)
    return GrpcStream(await connection.begin(_message(tokens, timed)), timed)


async def _grpc_streams(target: Target, count: int) -> list[GrpcStream]:
    connections = [await frames.connect(target.address, METHOD) for _ in range(CONNECTIONS)]
    turn = itertools.cycle(connections)
    message = _message(FOREVER, False)

    async def begin() -> GrpcStream:
        return GrpcStream(await next(turn).begin(message), False)

    return await _one_after_another(begin, count)


def _message(tokens: int, timed: bool) -> bytes:
    sampling = common_pb2.SamplingParams(max_tokens=tokens, ignore_eos=True)
    if timed:
        sampling.logprobs = 0
    chat = {"messages": [{"role": "user", "content": PROMPT}]}
    return inference_pb2.GenerateRequest(prompt={"chat": chat}, sampling=sampling).SerializeToString()
