"""Clients that do not read, and connections that have become old."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable

import grpc
import httpx
import pytest
from millrace.v1 import inference_pb2, inference_pb2_grpc, worker_pb2
from millrace_common.reasons import Reason
from millrace_router.apis import public_http
from millrace_rpc import http_connection
from millrace_rpc.errors import from_rpc_error
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker, expected, output
from router.harness import Cluster

PROMPT = [10, 20, 30]


async def endless(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator[worker_pb2.SequenceOutput]:
    """As fast as it can, until it is aborted; with log-probabilities and large steps, to fill buffers soon."""
    first = request.num_prior_outputs
    while True:
        await asyncio.sleep(0)
        yield output(request, first, 20)
        first += 20


def request(**sampling: int) -> inference_pb2.GenerateRequest:
    sampling = {"max_tokens": 500, "seed": 0, **sampling}
    return inference_pb2.GenerateRequest(prompt={"token_ids": {"ids": PROMPT}}, sampling=sampling)


async def slow(cluster: Callable, unread: int = 200) -> Cluster:
    prefill, decode = FakeWorker(PREFILL), FakeWorker(DECODE)
    prefill.context = decode.context = 1 << 20
    decode.script.append(endless)
    return await cluster(prefill, decode, limits={"unread": unread})


async def test_a_grpc_client_that_does_not_read(cluster: Callable) -> None:
    """Its workers are freed, others are served meanwhile, and when it does read it gets what was kept and the error."""
    made = await slow(cluster)
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{made.router.ports['grpc']}", options=options) as ch:
        call = inference_pb2_grpc.InferenceStub(ch).Generate(request(max_tokens=1 << 19, logprobs=20))
        first = await call.read()
        await made.until(lambda: bool(made.decodes[0].aborted), 30)
        assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
        got = list(first.token_ids)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while (response := await call.read()) is not grpc.aio.EOF:
                got += response.token_ids
        assert from_rpc_error(caught.value).reason is Reason.SLOW_CLIENT
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert got == expected(PROMPT, len(got)), "what it got has no hole"
    await made.quiet()
    assert made.metric("millrace_requests_total", api="grpc", status="slow_client") == 1


async def test_an_http_client_that_does_not_read(cluster: Callable) -> None:
    made = await slow(cluster)
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1 << 19, "stream": True, "seed": 0, "logprobs": 5})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", made.router.ports["http"]))
        client.sendall((head + body).encode())
        await made.until(lambda: bool(made.decodes[0].aborted), 30)
        assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)
        client.settimeout(10)
        text = await asyncio.to_thread(_read_to, client, b'"code":"slow_client"')
        assert text.startswith(b"HTTP/1.1 200")
    await made.quiet()


def _read_to(client: socket.socket, mark: bytes) -> bytes:
    text = b""
    while mark not in text[-4096:]:
        piece = client.recv(1 << 16)
        assert piece, text[-200:]
        text += piece
    return text


async def test_a_client_that_reads_slowly_gets_everything(pair: Cluster) -> None:
    """Fewer, larger deltas; nothing is lost."""
    pair.decodes[0].step_s = 0.001
    call = pair.stub.Generate(request(max_tokens=100))
    got: list[int] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        got += response.token_ids
        await asyncio.sleep(0.02)
    assert got == expected(PROMPT, 100)


async def test_a_client_that_leaves_in_the_middle_of_its_request_is_no_fault(pair: Cluster) -> None:
    """What an app raises, its server logs as a fault."""
    app = public_http.build(pair.router.inference, None)
    scope = {"type": "http", "method": "POST", "path": "/tokenize", "query_string": b"", "headers": []}
    statuses = []

    async def receive() -> dict[str, str]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, object]) -> None:
        statuses.append(message.get("status"))

    await app(scope, receive, send)
    assert statuses[0] == 499


async def test_a_connection_without_a_whole_request_ends(cluster: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("millrace_rpc.http_connection.MAX_HEAD_S", 0.2)
    pair = await cluster(FakeWorker(UNIFIED), connections={"idle": 0.2})
    begun = b"GET /health HTTP/1.1\r\nhost: x\r\n"
    for sent, answers in ((b"", 0), (begun, 0), (begun + b"\r\n" + begun, 1)):
        reader, writer = await asyncio.open_connection("127.0.0.1", pair.router.ports["http"])
        writer.write(sent)
        answer = await asyncio.wait_for(reader.read(), 120)
        assert answer.count(b'{"status":"ok"}') == answers
        writer.close()


async def test_a_request_that_is_begun_while_another_runs_does_not_end_it(
    cluster: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("millrace_rpc.http_connection.MAX_HEAD_S", 0.05)
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE, step_s=0.05))
    body = json.dumps({"prompt": PROMPT, "max_tokens": 8, "stream": True})
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection("127.0.0.1", made.router.ports["http"])
    writer.write((head + body + "GET /health HTTP/1.1\r\n").encode())
    assert b"[DONE]" in await asyncio.wait_for(reader.read(), 120)
    writer.close()


# ------------------------------------------------------------------------------------- age


async def test_old_grpc_connections_end_in_good_order(cluster: Callable) -> None:
    """The client connects again by itself, to whichever router answers then; a running stream is not touched."""
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE, step_s=0.02), connections={"max_age": 0.3})
    call = made.stub.Generate(request(max_tokens=100))
    said_goodbye = asyncio.create_task(_becomes(made.public, grpc.ChannelConnectivity.IDLE))
    got: list[int] = []
    while (response := await call.read()) is not grpc.aio.EOF:
        got += response.token_ids
    assert got == expected(PROMPT, 100), "2 s on a connection that may be 0.3 s old"
    await asyncio.wait_for(said_goodbye, 120)
    assert (await made.generate(PROMPT)).tokens() == expected(PROMPT, 8)


async def _becomes(channel: grpc.aio.Channel, wanted: grpc.ChannelConnectivity) -> None:
    while (state := channel.get_state()) is not wanted:
        await channel.wait_for_state_change(state)


@pytest.mark.parametrize(("max_requests", "max_age"), [(3, None), (10_000, 0.2)])
async def test_old_http_connections_end_with_an_answer(
    cluster: Callable, monkeypatch: pytest.MonkeyPatch, max_requests: int, max_age: float | None
) -> None:
    monkeypatch.setattr(http_connection, "MAX_REQUESTS", max_requests)
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), connections={"max_age": max_age})
    async with httpx.AsyncClient(base_url=made.url) as client, asyncio.timeout(120):
        closed = []
        while not any(closed):
            answer = await client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2})
            assert answer.status_code == 200
            closed.append(answer.headers.get("connection") == "close")
        assert len(closed) == 3 if max_age is None else len(closed) > 1
        assert (await client.get("/health")).status_code == 200


async def test_without_an_age_connections_stay(pair: Cluster) -> None:
    for _ in range(5):
        assert (await pair.http.get("/health")).headers.get("connection") != "close"


async def test_a_stream_interval_makes_fewer_messages_of_the_same_tokens(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE, step_s=0.002), stream_interval=0.1)
    result = await made.generate(PROMPT, sampling={"max_tokens": 60, "logprobs": 0})
    assert result.tokens() == expected(PROMPT, 60)
    for response in result.responses:
        assert [entry.sampled.token_id for entry in response.logprobs] == response.token_ids
    assert len(result.responses) < 30 and len(result.responses[0].token_ids) < 10, "the first one is not held back"
    await made.quiet()
