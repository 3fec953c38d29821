"""What a tenant may run at once, and that whatever ends a request gives it back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import grpc
import httpx
import pytest
from millrace.v1 import inference_pb2, worker_pb2
from millrace_common.reasons import Reason
from millrace_router.http.api_keys import Keys
from millrace_router.queue.tenant import Running, Tenant
from millrace_rpc.errors import MillraceError, from_rpc_error
from router.fake_worker import UNIFIED, Behaviour, FakeWorker, fails, hangs, normal
from router.harness import Cluster

KEY, OTHER = "sk-first-secret-1-0123456789abcdef", "sk-second-secret-2-0123456789abcdef"
PROMPT = [10, 20, 30]


def bearer(key: str = KEY) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def body(n: int = 1, max_tokens: int = 4, **fields: object) -> dict[str, object]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": max_tokens, "n": n, "seed": 0, **fields}


@pytest.fixture
async def limited(cluster: Callable, tmp_path: Path) -> Cluster:
    limits = {"max_concurrent": 4, "max_tokens_in_flight": 100}
    entries = [{"name": "one", "key": KEY, **limits}, {"name": "two", "key": OTHER}]
    (tmp_path / "keys").write_text(json.dumps({"keys": entries}))
    timeouts = {"queue": 0.5}
    return await cluster(FakeWorker(UNIFIED), api_keys=str(tmp_path / "keys"), timeouts=timeouts, max_attempts=2)


def running(made: Cluster) -> Running:
    return made.router._keys.tenant(f"Bearer {KEY}").running


async def start(made: Cluster, n: int, max_tokens: int) -> asyncio.Task[httpx.Response]:
    """A request that runs until it is cancelled."""
    before = running(made).requests
    made.workers[0].script.extend([hangs(1)] * n)
    wanted = made.http.post("/v1/completions", json=body(n, max_tokens), headers=bearer())
    task = asyncio.create_task(wanted)
    await made.until(lambda: running(made).requests == before + n)
    return task


async def grpc_error(made: Cluster, n: int, max_tokens: int) -> tuple[grpc.StatusCode, MillraceError]:
    request = inference_pb2.GenerateRequest(
        prompt={"token_ids": {"ids": PROMPT}}, sampling={"max_tokens": max_tokens, "seed": 0}, n=n
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in made.stub.Generate(request, metadata=tuple(bearer().items()), timeout=10):
            pass
    return caught.value.code(), from_rpc_error(caught.value)


@pytest.mark.parametrize(
    ("held", "asked", "limit"),
    [
        ((3, 4), (2, 4), "max_concurrent of one is 4: 3 requests run, and this needs 2"),
        ((1, 90), (1, 5), "max_tokens_in_flight of one is 100: 93 tokens run, and this needs 8"),
        ((2, 30), (2, 15), "max_tokens_in_flight of one is 100: 66 tokens run, and this needs 36"),
    ],
)
async def test_more_than_a_limit_is_refused_until_something_ends(
    limited: Cluster, held: tuple[int, int], asked: tuple[int, int], limit: str
) -> None:
    task = await start(limited, *held)
    answer = await limited.http.post("/v1/completions", json=body(*asked), headers=bearer())
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["message"] == limit and answer.json()["error"]["code"] == "rate_limited"
    code, error = await grpc_error(limited, *asked)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and error.retry_after_s == 1 and error.message == limit
    other = await limited.http.post("/v1/completions", json=body(*asked), headers=bearer(OTHER))
    assert other.status_code == 200, "another tenant has its own limits"
    task.cancel()
    await limited.until(lambda: (running(limited).requests, running(limited).tokens) == (0, 0))
    assert (await limited.http.post("/v1/completions", json=body(*asked), headers=bearer())).status_code == 200


@pytest.mark.parametrize(
    ("asked", "field", "limit"),
    [
        ((5, 4), "n", "n asks for too much: max_concurrent of one is 4, and this needs 5 requests at once"),
        ((1, 98), "max_tokens", "max_tokens asks for too much: max_tokens_in_flight of one is 100, and this needs 101"),
    ],
)
async def test_what_never_fits_is_a_mistake(limited: Cluster, asked: tuple[int, int], field: str, limit: str) -> None:
    answer = await limited.http.post("/v1/completions", json=body(*asked), headers=bearer())
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["message"].startswith(limit) and error["param"] == field
    code, refusal = await grpc_error(limited, *asked)
    assert code is grpc.StatusCode.INVALID_ARGUMENT and refusal.message.startswith(limit)
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 200}
    answer = await limited.http.post("/v1/chat/completions", json=chat, headers=bearer())
    assert answer.json()["error"]["param"] == "max_completion_tokens", "by the name that the client wrote"
    assert not limited.workers[0].submitted


def test_a_new_file_changes_the_limits_and_not_what_runs(tmp_path: Path) -> None:
    now, path = [0.0], tmp_path / "keys"
    path.write_text(json.dumps({"keys": [{"name": "a", "key": KEY}]}))
    keys = Keys(path, lambda: now[0], lambda outcome: None)
    before = keys.tenant(f"Bearer {KEY}")
    before.running.add(2, 20)
    path.write_text(json.dumps({"keys": [{"name": "a", "key": KEY, "max_concurrent": 2}]}))
    now[0] = 1.0
    after = keys.tenant(f"Bearer {KEY}")
    with pytest.raises(MillraceError) as caught:
        after.check(1.0)
    assert caught.value.reason is Reason.RATE_LIMITED
    before.running.add(-1, -10)
    after.check(1.0)


# ------------------------------------------------------------------------------------- given back, whatever happens

WORKER = {
    "answers": normal,
    "fails": fails("INTERNAL"),
    "fails later": fails("INTERNAL", 2),
    "is lost": fails("WORKER_LOST", 1),
    "is busy": fails("OVERLOADED"),
    "hangs": hangs(),
    "hangs later": hangs(2),
}


class Scripts:
    """The seed of a request says what the worker does with it."""

    def popleft(self) -> Behaviour:
        def behave(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator[worker_pb2.SequenceOutput]:
            kind = list(WORKER)[request.sampling.seed // 100]
            busy_again = kind == "is busy" and request.id.attempt > 0
            return (normal if busy_again else WORKER[kind])(worker, request)

        return behave


CLIENT = ("reads", "leaves at once", "leaves later", "has a deadline")
API = ("grpc", "stream", "whole")


async def by_grpc(made: Cluster, n: int, max_tokens: int, seed: int, client: str) -> None:
    request = inference_pb2.GenerateRequest(
        prompt={"token_ids": {"ids": PROMPT}}, sampling={"max_tokens": max_tokens, "seed": seed}, n=n
    )
    timeout = 0.05 if client == "has a deadline" else None
    call = made.stub.Generate(request, metadata=tuple(bearer().items()), timeout=timeout)
    with contextlib.suppress(grpc.aio.AioRpcError):
        if client != "leaves at once":
            async for _ in call:
                if client == "leaves later":
                    break
    call.cancel()


async def by_http(made: Cluster, n: int, max_tokens: int, seed: int, client: str, stream: bool) -> None:
    """With a socket, which a client that leaves closes in the middle."""
    text = json.dumps(body(n, max_tokens, stream=stream, seed=seed))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\nconnection: close\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", made.router.ports["http"])
    writer.write(f"{head}content-length: {len(text)}\r\n\r\n{text}".encode())
    with contextlib.suppress(TimeoutError):
        if client == "reads":
            await reader.read()
        elif client == "leaves later":
            await asyncio.wait_for(reader.read(16), 0.05)
        elif client == "has a deadline":
            await asyncio.wait_for(reader.read(), 0.05)
    writer.transport.abort()


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_ends_a_request_gives_back_what_it_held(
    limited: Cluster, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    draw, seen, ends = random.Random(seed), set(), set()
    real = Running.add

    def add(self: Running, requests: int, tokens: int) -> None:
        real(self, requests, tokens)
        if self.max_concurrent is not None:
            seen.add((self.requests, self.tokens))

    monkeypatch.setattr(Running, "add", add)
    limited.workers[0].script = Scripts()
    at_once = asyncio.Semaphore(6)

    async def one() -> None:
        n, max_tokens = draw.choice((1, 1, 1, 2, 3, 5)), draw.choice((1, 4, 20, 70, 98))
        client, api, does = draw.choice(CLIENT), draw.choice(API), draw.choice(list(WORKER))
        if client in ("reads", "leaves later") and does.startswith("hangs"):
            client = "leaves at once" if does == "hangs" else "leaves later"
        ends.add((client, api, does))
        asked = limited, n, max_tokens, 100 * list(WORKER).index(does), client
        async with at_once:
            await (by_grpc(*asked) if api == "grpc" else by_http(*asked, api == "stream"))

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        for _ in range(100):
            group.create_task(one())
    await limited.until(lambda: not limited.router.inference.active)
    assert (running(limited).requests, running(limited).tokens) == (0, 0)
    requests, tokens = ({*column} for column in zip(*seen, strict=True))
    assert min(requests) == min(tokens) == 0 and max(requests) == 4 and 50 < max(tokens) <= 100
    assert len(ends) > 50, "in many ways"


def test_a_tenant_without_limits_has_none() -> None:
    tenant = Tenant()
    tenant.running.add(10**6, 10**9)
    tenant.check(0.0, 10**6, 10**9)
