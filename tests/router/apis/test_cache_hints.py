"""Hints about the prompt cache that clients send, and what `usage` says about it."""

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from millrace.v1 import worker_pb2
from router.fake_worker import FakeWorker, normal
from router.harness import Cluster

CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
TEXT = "x" * 150
ASKED = [{"role": "user", "content": TEXT}]
PLAIN: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASKED, "max_tokens": 2},
    COMPLETIONS: {"prompt": TEXT, "max_tokens": 2},
    RESPONSES: {"input": TEXT, "max_output_tokens": 2},
    MESSAGES: {"messages": ASKED, "max_tokens": 2},
}
OPENAI = (CHAT, COMPLETIONS, RESPONSES)


def marked(ttl: str | None = None) -> dict[str, Any]:
    return {"cache_control": {"type": "ephemeral", "ttl": ttl}}


def turn(*parts: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"} | part for part in parts], **more}]}


SCHEMA = {"type": "object"}
CALL = {
    "role": "assistant",
    "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {"cache_control": "mine"}}],
}
RESULT = {"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "x", **marked("1h")}]}
HINTS = [
    *((url, body, keep_s) for url in PLAIN for body, keep_s in (({}, 0), (marked(), 300), (marked("1h"), 3600))),
    *((url, {"prompt_cache_retention": name}, keep_s)
      for url in OPENAI for name, keep_s in (("in_memory", 300), ("in-memory", 300), ("24h", 86_400), (None, 0))),
    *((url, {"prompt_cache_options": {"mode": "explicit", "ttl": ttl}}, keep_s)
      for url in OPENAI for ttl, keep_s in (("30m", 1800), ("12h", 43_200))),
    *((url, {"prompt_cache_options": {"mode": "implicit"}}, 0) for url in OPENAI),
    (CHAT, {"prompt_cache_retention": "in_memory", **marked("1h")}, 3600),
    *((url, turn({}, marked()), 300) for url in (CHAT, MESSAGES)),
    *((url, turn(marked("1h"), marked("5m")), 3600) for url in (CHAT, MESSAGES)),
    *((url, turn({}, **marked("1h")), 3600) for url in (CHAT, MESSAGES)),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "f"}, **marked("1h")}]}, 3600),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": SCHEMA, **marked("1h")}]}, 3600),
    *((url, {"tools": [{"type": "web_search", **marked("1h")}]}, 3600) for url in (CHAT, RESPONSES, MESSAGES)),
    (MESSAGES, {"tools": [{"name": "f", "input_schema": SCHEMA | {"properties": marked("1h")}}]}, 0),
    (MESSAGES, {"system": [{"type": "text", "text": "x", **marked()}]}, 300),
    (MESSAGES, {"messages": [*ASKED, CALL, {"role": "user", "content": [RESULT]}]}, 3600),
]  # fmt: skip


async def test_pages_are_kept_as_long_as_the_longest_hint_says(serve: Callable) -> None:
    pair = await serve("v32")
    for url, more, keep_s in HINTS:
        answer = await pair.direct.post(url, json=PLAIN[url] | more)
        assert answer.status_code == 200, (url, more, answer.text)
        await pair.quiet()
        kept = [worker.submitted[-1].keep_s for worker in pair.workers]
        assert kept == [keep_s] * 2, (url, more)
    assert (await pair.generate([1, 2, 3], keep_s=7)).error is None
    assert pair.prefills[0].submitted[-1].keep_s == 7


@pytest.mark.parametrize(
    ("url", "more", "message"),
    [
        (CHAT, turn(marked("2h")), "messages[0].content[0].cache_control must be an object with the ttl 5m or 1h"),
        (MESSAGES, {"cache_control": "5m"}, 'cache_control must be an object, not "5m"'),
        (MESSAGES, {"cache_control": [1]}, "cache_control must be an object, not an array"),
        (RESPONSES, {"prompt_cache_retention": "2h"}, "prompt_cache_retention must be "),
        (COMPLETIONS, {"prompt_cache_options": {"ttl": "1h"}}, "prompt_cache_options.ttl must be '30m' or '12h', not"),
        (CHAT, {"prompt_cache_key": "x" * 513}, "prompt_cache_key must have at most 512 characters"),
    ],
)  # fmt: skip
async def test_bad_hints_are_named(url: str, more: dict[str, Any], message: str, pair: Cluster) -> None:
    answer = await pair.direct.post(url, json=PLAIN[url] | more)
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(message), answer.text


async def test_usage_tells_what_came_from_the_cache_and_what_went_into_it(pair: Cluster) -> None:
    async def half(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator[worker_pb2.SequenceOutput]:
        async for out in normal(worker, request):
            out.cached_tokens = 64
            yield out

    for url, body in PLAIN.items():
        for worker in pair.workers:
            worker.script.append(half)
        usage = (await pair.direct.post(url, json=body)).json()["usage"]
        tokens = len(pair.prefills[0].submitted[-1].token_ids)
        assert tokens // 64 == 2
        if url == MESSAGES:
            read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
            assert usage["input_tokens"] == tokens - read - written
        else:
            details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
            read, written = details["cached_tokens"], details["cache_write_tokens"]
            assert usage.get("prompt_tokens", usage.get("input_tokens")) == tokens
        assert (read, written) == (64, 64), url
