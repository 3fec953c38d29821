"""Tenants that do what they may and what they may not, over HTTP and gRPC: a process of its own.

    python -m millrace_testing.hostile_tenant http://127.0.0.1:8000 127.0.0.1:50051 KEY …

Each attack has a key, so that one that uses up its rates does not hide the others; with fewer keys they take turns.
It says `ready` when most attacks were made once. At SIGTERM it prints, as JSON, how often each attack had which
outcome.
"""

import asyncio
import contextlib
import itertools
import json
import os
import random
import signal
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import httpx
from millrace.v1 import common_pb2, inference_pb2, inference_pb2_grpc
from millrace_rpc.client import channel

CONTEXT = 4096  # tokens of the system that is attacked
PAUSE_S = 0.2  # between two of one attacker: some 100 requests per second of all, on cores that others need too
LONGEST_S = 20.0  # of an attack
CONNECTIONS = 100
SPECIAL = "<｜begin▁of▁sentence｜><｜User｜><｜Assistant｜><｜tool▁calls▁begin｜><|im_start|>system<|eot_id|></s>"
REGEX = ".*" * 1_900
NESTED: dict[str, Any] = {
    "anyOf": [
        {"type": "object", "properties": {f"k{i}_{j}": {"type": "string", "maxLength": 90 + j} for j in range(12)}}
        for i in range(60)
    ]
}


class Hostile:
    def __init__(self, url: str, address: str, key: str) -> None:
        self._url = httpx.URL(url)
        self._key = key
        self.http = httpx.AsyncClient(base_url=url, timeout=LONGEST_S, headers={"authorization": f"Bearer {key}"})
        self._channel = channel(address)
        self._stub = inference_pb2_grpc.InferenceStub(self._channel)
        self._metadata = (("authorization", f"Bearer {key}"),)
        self._numbers = itertools.count(os.getpid() * 1000)
        self._rng = random.Random(os.getpid())
        self.attacks: dict[str, Callable[[], Awaitable[str]]] = {
            "huge regexes, HTTP": lambda: self._complete(guided_regex=f"{next(self._numbers)}{REGEX}"),
            "huge regexes, gRPC": lambda: self._generate(grammar={"regex": f"{next(self._numbers)}{REGEX}"}),
            "huge schemas, HTTP": self._schema,
            "huge schemas, gRPC": lambda: self._generate(grammar={"json_schema": self._nested()}),
            "bodies that stay incomplete": lambda: self._raw(1 << 20, self._key, held=True),
            "bodies behind a 401": lambda: self._raw(4 << 20, "sk-nobody-knows-this-key-0123456789"),
            "many connections": self._connections,
            "malformed requests, HTTP": self._malformed_http,
            "malformed requests, gRPC": self._malformed_grpc,
            "maximal requests, HTTP": lambda: self._complete(
                n=16, max_tokens=CONTEXT - 400, logprobs=20, prompt=self._tokens(300)
            ),
            "maximal requests, gRPC": lambda: self._generate(
                self._tokens(300), n=16, max_tokens=CONTEXT - 400, logprobs=20, ignore_eos=True
            ),
            "streams that nobody reads, HTTP": self._unread_http,
            "streams that nobody reads, gRPC": lambda: self._left(CONTEXT - 20, LONGEST_S / 2),
            "special tokens as text, HTTP": lambda: self._complete(prompt=SPECIAL * 20, max_tokens=20),
            "special tokens as text, gRPC": lambda: self._generate(SPECIAL * 20, max_tokens=20),
            "prompts that differ in one token of a page": self._near,
            "/tokenize": lambda: self._post("/tokenize", {"prompt": "the quick brown fox " * 10_000}),
            "Tokenize": self._tokenize,
            "aborted streams, HTTP": self._aborted_http,
            "aborted streams, gRPC": lambda: self._left(500, 0.0),
            "long prompts, HTTP": lambda: self._complete(prompt=self._tokens(CONTEXT - 20), max_tokens=1),
            "long prompts, gRPC": lambda: self._generate(self._tokens(CONTEXT - 20), max_tokens=1),
        }

    async def run(self, name: str, found: Counter[str], told: Callable[[], None]) -> None:
        """One attack again and again; what it had as outcome is counted in `found`."""
        while True:
            try:
                async with asyncio.timeout(LONGEST_S):
                    found[await self.attacks[name]()] += 1
            except TimeoutError:
                found["no answer"] += 1
            except (httpx.HTTPError, OSError, asyncio.IncompleteReadError) as error:
                found[type(error).__name__] += 1
            except grpc.aio.AioRpcError as error:
                found[error.code().name] += 1
            told()
            await asyncio.sleep(PAUSE_S)

    def _tokens(self, count: int) -> list[int]:
        return self._rng.choices(range(16, 1000), k=count)

    def _nested(self) -> str:
        return json.dumps(NESTED | {"title": str(next(self._numbers))})

    async def _post(self, path: str, body: Any) -> str:
        return str((await self.http.post(path, json=body)).status_code)

    async def _complete(self, **fields: Any) -> str:
        return await self._post("/v1/completions", {"prompt": "x", "max_tokens": 4, **fields})

    async def _schema(self) -> str:
        schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": json.loads(self._nested())}}
        return await self._complete(response_format=schema)

    def _call(self, prompt: list[int] | str, n: int = 1, **sampling: Any) -> grpc.aio.UnaryStreamCall:
        wanted = {"text": prompt} if isinstance(prompt, str) else {"token_ids": {"ids": prompt}}
        request = inference_pb2.GenerateRequest(
            prompt=wanted, n=n, sampling=common_pb2.SamplingParams(**{"max_tokens": 4, **sampling})
        )
        return self._stub.Generate(request, metadata=self._metadata, timeout=LONGEST_S)

    async def _generate(self, prompt: list[int] | str = "x", n: int = 1, **sampling: Any) -> str:
        async for _ in self._call(prompt, n, **sampling):
            pass
        return "OK"

    async def _tokenize(self) -> str:
        request = inference_pb2.TokenizeRequest(prompt={"text": "the quick brown fox " * 10_000})
        await self._stub.Tokenize(request, metadata=self._metadata, timeout=LONGEST_S)
        return "OK"

    @contextlib.asynccontextmanager
    async def _connection(self) -> Any:
        reader, writer = await asyncio.open_connection(self._url.host, self._url.port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _head(self, size: int, key: str, path: str = "/v1/completions") -> bytes:
        lines = (f"POST {path} HTTP/1.1", "host: x", f"authorization: Bearer {key}", f"content-length: {size}", "", "")
        return "\r\n".join(lines).encode()

    async def _raw(self, size: int, key: str, held: bool = False) -> str:
        """`held`: the last byte comes never."""
        async with self._connection() as (reader, writer):
            writer.write(self._head(size, key) + b" " * (size - held))
            status = (await reader.readline()).split()
            return status[1].decode() if len(status) > 1 else "closed"

    async def _connections(self) -> str:
        async with contextlib.AsyncExitStack() as stack:
            for _ in range(CONNECTIONS):
                await stack.enter_async_context(self._connection())
            await asyncio.sleep(1.0)
        return "closed"

    async def _malformed_http(self) -> str:
        bodies = (
            b"{",
            b"[" * 5_000,
            b'{"prompt": [1e99]}',
            b'{"max_tokens": -1}',
            b'{"prompt": "\\ud800"}',
            b"\xff\xfe",
        )
        return str((await self.http.post("/v1/chat/completions", content=self._rng.choice(bodies))).status_code)

    async def _malformed_grpc(self) -> str:
        call = self._channel.unary_stream("/millrace.v1.Inference/Generate")
        async for _ in call(self._rng.randbytes(200), metadata=self._metadata, timeout=LONGEST_S):
            pass
        return "OK"

    async def _unread_http(self) -> str:
        body = json.dumps({"prompt": "x", "max_tokens": CONTEXT - 20, "stream": True, "ignore_eos": True}).encode()
        async with self._connection() as (_, writer):
            writer.write(self._head(len(body), self._key) + body)
            await asyncio.sleep(LONGEST_S / 2)
        return "left"

    async def _left(self, max_tokens: int, seconds: float) -> str:
        call = self._call("x", max_tokens=max_tokens, ignore_eos=True)
        await call.read()
        await asyncio.sleep(seconds)
        call.cancel()
        return "left"

    async def _near(self) -> str:
        """Of another tenant's prompts: a page is known by its tokens, and by who sent it."""
        prompt = [16 + i % 900 for i in range(256)]
        prompt[self._rng.randrange(256)] = self._rng.randrange(16, 1000)
        return await self._complete(prompt=prompt, max_tokens=1)

    async def _aborted_http(self) -> str:
        body = {"prompt": "x", "max_tokens": 500, "stream": True, "ignore_eos": True}
        async with self.http.stream("POST", "/v1/completions", json=body) as answer:
            async for _ in answer.aiter_bytes():
                break
            return str(answer.status_code)


async def main() -> None:
    url, address, *keys = sys.argv[1:]
    ended, begun = asyncio.Event(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    tenants = [Hostile(url, address, key) for key in keys]
    outcomes: dict[str, Counter[str]] = {}

    def told() -> None:
        if sum(map(bool, outcomes.values())) > len(outcomes) // 2:
            begun.set()

    tasks = []
    for name, hostile in zip(tenants[0].attacks, itertools.cycle(tenants), strict=False):
        found = outcomes[name] = Counter()
        tasks.append(asyncio.create_task(hostile.run(name, found, told)))
    await begun.wait()
    print("ready", flush=True)  # noqa: T201
    await ended.wait()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    print(json.dumps(outcomes), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
