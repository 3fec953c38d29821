"""Streams in which nothing is said for a while, because proxies end a connection that is silent for a minute."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest
from millrace.v1 import common_pb2, worker_pb2
from millrace_router.flow.heartbeat import Heartbeat
from router.fake_worker import UNIFIED, FakeWorker, failure, output
from router.harness import Cluster

QUESTION = {"model": "tiny", "max_tokens": 4, "stream": True}
ASKED = [{"role": "user", "content": "hello"}]
BODIES = {
    "/v1/completions": QUESTION | {"prompt": "hello", "seed": 0},
    "/v1/chat/completions": QUESTION | {"messages": ASKED, "seed": 0},
    "/v1/responses": {"model": "tiny", "max_output_tokens": 4, "stream": True, "input": "hello", "seed": 0},
    "/v1/messages": QUESTION | {"messages": ASKED, "seed": 0},
}
COMMENT, PING = ": keep-alive", 'event: ping\ndata: {"type":"ping"}'


class Clock:
    """An event loop's times and timers."""

    def __init__(self) -> None:
        self.at = 0.0
        self.timers: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.at

    def call_at(self, when: float, call: Callable[[], None]) -> Any:
        self.timers.append((when, call))
        return None

    def run_to(self, when: float) -> None:
        while self.timers and self.timers[0][0] <= when:
            self.at, call = self.timers.pop(0)
            call()
        self.at = when


def test_a_beat_for_every_ten_seconds_of_silence() -> None:
    clock, beats = Clock(), []
    beat = Heartbeat(10.0, clock)
    beat.start(lambda: beats.append(clock.at))
    clock.run_to(35.0)
    assert beats == [10, 20, 30]
    beat.sent_at = 35.0  # a token
    clock.run_to(44.9)
    assert beats == [10, 20, 30]
    beat.sent_at = 44.9
    clock.run_to(70.0)
    assert beats == [10, 20, 30, 54.9, 64.9]


class Waiting:
    """A worker that says nothing until it may: before its first token, and after it."""

    def __init__(self, *, fails: bool = False) -> None:
        self.first, self.rest = asyncio.Event(), asyncio.Event()
        self._fails = fails

    async def __call__(
        self, worker: FakeWorker, request: worker_pb2.EngineRequest
    ) -> AsyncIterator[worker_pb2.SequenceOutput]:
        await self.first.wait()
        if self._fails:
            yield failure(request, "INTERNAL")
            return
        yield output(request, 0)
        await self.rest.wait()
        yield output(request, 1, 3, finish=common_pb2.FINISH_REASON_STOP)


@pytest.fixture
async def made(cluster: Callable) -> Cluster:
    return await cluster(FakeWorker(UNIFIED), connections={"keep_alive": 0.03})


async def events(answer: httpx.Response) -> AsyncIterator[str]:
    text = ""
    async for piece in answer.aiter_text():
        text += piece
        *whole, text = text.split("\n\n")
        for event in whole:
            yield event
    assert not text


@pytest.mark.parametrize("path", BODIES)
async def test_a_silent_stream_says_that_it_lives(made: Cluster, path: str) -> None:
    """Before the first token, and between two; what the client reads is otherwise that of a stream without silence."""
    plain = await made.http.post(path, json=BODIES[path])
    silence = PING if path == "/v1/messages" else COMMENT
    waiting = Waiting()
    made.workers[0].script.append(waiting)
    seen, quiet = [], 0
    async with made.http.stream("POST", path, json=BODIES[path]) as answer:
        assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/event-stream")
        async for event in events(answer):
            seen.append(event)
            quiet = quiet + 1 if event == silence else 0
            if quiet == 3:
                (waiting.rest if waiting.first.is_set() else waiting.first).set()
    assert waiting.rest.is_set() and seen[:3] == [silence] * 3
    told = "".join(text_in(event) for event in seen)
    assert told and told == "".join(text_in(event) for event in plain.text.split("\n\n"))
    await made.quiet()


def text_in(event: str) -> str:
    data = event.rpartition("data: ")[2]
    if not data.startswith("{"):
        return ""
    value = json.loads(data)
    choices = value.get("choices") or [{}]
    delta = choices[0].get("delta") or value.get("delta") or {}
    texts = choices[0].get("text"), delta if isinstance(delta, str) else delta.get("content") or delta.get("text")
    return "".join(text for text in texts if text)


ERRORS = {
    "/v1/completions": lambda value: value["error"]["code"] == "internal",
    "/v1/chat/completions": lambda value: value["error"]["code"] == "internal",
    "/v1/responses": lambda value: value["type"] == "response.failed" and value["sequence_number"] == 2,
    "/v1/messages": lambda value: value["type"] == "error" and value["error"]["type"] == "api_error",
}


@pytest.mark.parametrize("path", BODIES)
async def test_a_failure_after_the_head_is_an_event_and_before_it_a_status(made: Cluster, path: str) -> None:
    waiting = Waiting(fails=True)
    made.workers[0].script.append(waiting)
    seen = []
    async with made.http.stream("POST", path, json=BODIES[path]) as answer:
        assert answer.status_code == 200
        async for event in events(answer):
            seen.append(event)
            waiting.first.set()
    assert ERRORS[path](json.loads(seen[-1].rpartition("data: ")[2])), seen
    made.router.inference.backend.config.connections.__dict__["keep_alive"] = 60.0
    at_once = Waiting(fails=True)
    at_once.first.set()
    made.workers[0].script.append(at_once)
    answer = await made.http.post(path, json=BODIES[path])
    assert answer.status_code == 500 and "scripted INTERNAL" in answer.text
    await made.quiet()


async def test_openais_client(made: Cluster) -> None:
    async with openai.AsyncOpenAI(base_url=f"{made.url}/v1", api_key="none", max_retries=0) as client:
        waiting = await delayed(made)
        stream = await client.chat.completions.create(**BODIES["/v1/chat/completions"])
        waiting.first.set()
        waiting.rest.set()
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        waiting = await delayed(made)
        async with client.responses.stream(model="tiny", input="hello", max_output_tokens=4) as answer:
            waiting.first.set()
            waiting.rest.set()
            whole = await answer.get_final_response()
        assert len(text) == len(whole.output_text) == 4
        waiting = await delayed(made, fails=True)
        stream = await client.chat.completions.create(**BODIES["/v1/chat/completions"])
        waiting.first.set()
        with pytest.raises(openai.APIError, match="scripted INTERNAL"):
            _ = [chunk async for chunk in stream]
        waiting = await delayed(made, fails=True)
        async with client.responses.stream(model="tiny", input="hello", max_output_tokens=4) as answer:
            waiting.first.set()
            kinds = [event.type async for event in answer]
        assert kinds == ["response.created", "response.in_progress", "response.failed"]


async def test_anthropics_client(made: Cluster) -> None:
    async with anthropic.AsyncAnthropic(base_url=made.url, api_key="none", max_retries=0) as client:
        waiting = await delayed(made)
        async with client.messages.stream(model="tiny", max_tokens=4, messages=ASKED) as stream:
            waiting.first.set()
            waiting.rest.set()
            message = await stream.get_final_message()
        assert len(message.content[0].text) == 4 and message.stop_reason == "end_turn"
        waiting = await delayed(made, fails=True)
        with pytest.raises(anthropic.APIStatusError, match="scripted INTERNAL"):
            async with client.messages.stream(model="tiny", max_tokens=4, messages=ASKED) as stream:
                waiting.first.set()
                await stream.get_final_message()


async def delayed(made: Cluster, *, fails: bool = False) -> Waiting:
    """The next request's head comes before its first token: the clients return from their call with the head."""
    waiting = Waiting(fails=fails)
    made.workers[0].script.append(waiting)
    return waiting


async def test_a_client_that_leaves_in_silence_is_noticed(made: Cluster) -> None:
    waiting = await delayed(made)
    async with made.http.stream("POST", "/v1/completions", json=BODIES["/v1/completions"]):
        pass
    await made.quiet()
    assert made.workers[0].aborted and not waiting.first.is_set()
