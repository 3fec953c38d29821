"""The OpenAI API as its own Python client sees it."""

import asyncio
import gc
import json
from collections.abc import AsyncIterator, Callable

import openai
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from router.fake_worker import DECODE, PREFILL, FakeWorker, expected, hangs
from router.harness import Cluster

HELLO = [{"role": "user", "content": "hello"}]


def text_of(made: Cluster, index: int = 0, length: int = 8, seed: int = 0) -> str:
    prompt = list(made.prefills[0].submitted[index].token_ids)
    return "".join(chr(token + 33) for token in expected(prompt, length, seed))


@pytest.fixture
async def client(pair: Cluster) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{pair.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_a_chat_is_answered_as_the_client_expects(pair: Cluster, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=8, seed=0, user="me")
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    (choice,) = answer.choices
    assert choice.message.role == "assistant" and choice.message.content == text_of(pair)
    assert choice.finish_reason == "length" and choice.logprobs is None
    usage = answer.usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(pair.prefills[0].submitted[0].token_ids), 8)
    assert usage.total_tokens == usage.prompt_tokens + 8
    await pair.quiet()


async def test_a_chat_stream_is_put_together_with_its_usage(pair: Cluster, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_completion_tokens=8,
        seed=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == text_of(pair)
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:-1]] == ["length"]
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 8
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize("include", [True, False])
async def test_usage_so_far(pair: Cluster, client: openai.AsyncOpenAI, include: bool) -> None:
    """What GuideLLM and AIPerf ask for, as of vLLM; without include_usage it has no meaning."""
    stream = await client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=8,
        stream=True,
        stream_options={"include_usage": include, "continuous_usage_stats": True},
    )
    usages = [chunk.usage async for chunk in stream]
    if not include:
        assert not any(usages)
        return
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts) and counts[0] >= 1 and counts[-2:] == [8, 8]
    assert {usage.total_tokens - usage.completion_tokens for usage in usages} == {usages[-1].prompt_tokens}


async def test_chat_logprobs_and_n(pair: Cluster, client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=3, seed=4, n=2, logprobs=True, top_logprobs=2
    )
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    for i, choice in enumerate(answer.choices):
        assert choice.index == i and choice.message.content == text_of(pair, length=3, seed=4 + i)
        tokens = choice.logprobs.content
        assert "".join(token.token for token in tokens) == choice.message.content
        assert all(token.bytes == list(token.token.encode()) and token.logprob == -0.5 for token in tokens)
        assert [top.token for top in tokens[0].top_logprobs] == ["a", "b"]
    assert answer.usage.completion_tokens == 6


async def test_a_completion_of_every_form_of_prompt_is_the_same(pair: Cluster, client: openai.AsyncOpenAI) -> None:
    for prompt in ("hello", [10, 20], ["hello"], [[10, 20]]):
        answer = await client.completions.create(model="tiny", prompt=prompt, max_tokens=8, seed=0, logprobs=1)
        Completion.model_validate(answer.model_dump(), strict=True)
        (choice,) = answer.choices
        assert choice.text == text_of(pair, index=len(pair.prefills[0].submitted) - 1)
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.text_offset == list(range(8))
        assert choice.logprobs.top_logprobs[0] == {choice.text[0]: -0.5, "a": -1.5}
    prompts = [list(request.token_ids) for request in pair.prefills[0].submitted]
    assert prompts[0] == prompts[2] and prompts[1] == prompts[3] == [10, 20]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 2])
async def test_disconnect_cancels_both_subs(pair: Cluster, stream: bool, after: int) -> None:
    pair.prefills[0].script.append(hangs())
    pair.decodes[0].script.append(hangs(after))
    body = json.dumps({"prompt": "x", "stream": stream}).encode()
    port = pair.router.ports["http"]
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await pair.until(lambda: pair.prefills[0].active and pair.decodes[0].active)
    if stream and after:
        assert await reader.readuntil(b"data: ")
    writer.close()
    await pair.quiet()
    assert all(len(worker.aborted) == 1 for worker in pair.workers)
    assert pair.metric("millrace_requests_total", api="http", status="cancelled") == 1


async def test_models_health_ready_and_metrics(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE))
    gc.collect()
    assert (await made.http.get("/health")).status_code == 200
    assert (await made.http.get("/ready")).status_code == 200
    [served] = (await made.http.get("/v1/models")).json()["data"]
    assert served["id"] == "tiny" and (await made.http.get("/v1/models/tiny")).json() == served
    unknown = await made.http.get("/v1/models/acme/large")
    assert unknown.status_code == 404 and "'acme/large' is not served here" in unknown.json()["error"]["message"]
    metrics = (await made.http.get("/metrics")).text
    assert 'millrace_workers{role="decode",state="routable"} 1.0' in metrics
    assert 'millrace_gc_freezes_total{process="router"} 2.0' in metrics
    assert 'millrace_gc_pause_seconds_count{generation="2",process="router"}' in metrics
    await made.decodes[0].stop()
    await made.until(lambda: not made.router.registry.ready)
    answer = await made.http.get("/ready")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "no_workers"
    assert (await made.http.get("/health")).status_code == 200
    await made.decodes[0].restart()
    await made.until(lambda: made.router.registry.ready)
    assert (await made.http.get("/ready")).status_code == 200


async def test_request_id_travels(pair: Cluster) -> None:
    headers = {"x-request-id": "mine-1"}
    answer = await pair.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers=headers)
    assert answer.headers["x-request-id"] == "mine-1" and answer.json()["id"] == "cmpl-mine-1"
    assert pair.prefills[0].submitted[0].request_id == "mine-1"
    for body in ({"prompt": "x", "n": 0}, {"prompt": 1}):
        assert (await pair.http.post("/v1/completions", json=body, headers=headers)).headers["x-request-id"] == "mine-1"
    drawn = await pair.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2})
    assert drawn.headers["x-request-id"] == pair.prefills[0].submitted[1].request_id == drawn.json()["id"][5:]
    too_long = await pair.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "x" * 129})
    assert too_long.status_code == 400 and too_long.json()["error"]["param"] == "x-request-id"
