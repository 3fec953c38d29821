"""Drafts in the usage of an answer and in the metrics of pairs: sums over the attempts of a request."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from millrace.v1 import worker_pb2
from millrace_router.discovery.base import Target
from router.fake_worker import DECODE, PREFILL, UNIFIED, Behaviour, FakeWorker, expected, failure, normal, output
from router.harness import Cluster

PROMPT = [10, 20, 30]
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


def drafts(drafted: int, accepted: int, fails_after: int | None = None) -> Behaviour:
    """Says so with its last output, which is an error after `fails_after` tokens."""

    async def behave(worker: FakeWorker, request: worker_pb2.EngineRequest) -> AsyncIterator[worker_pb2.SequenceOutput]:
        if fails_after is not None:
            for i in range(fails_after):
                yield output(request, request.num_prior_outputs + i)
            end = failure(request, "KV_EXPIRED")
            end.drafted_tokens, end.accepted_draft_tokens = drafted, accepted
            yield end
            return
        async for out in normal(worker, request):
            if out.finish_reason:
                out.drafted_tokens, out.accepted_draft_tokens = drafted, accepted
            yield out

    return behave


def counted(made: Cluster, prefill: str, decode: str) -> tuple[float, float]:
    pair = {"prefill": prefill, "decode": decode}
    names = ("millrace_drafted_tokens_total", "millrace_accepted_draft_tokens_total")
    return made.metric(names[0], **pair), made.metric(names[1], **pair)


async def test_usage_sums_over_the_attempts(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), FakeWorker(DECODE))
    made.decodes[1].script = made.decodes[0].script
    made.decodes[0].script.extend([drafts(4, 1, fails_after=3), drafts(9, 5)])
    result = await made.generate(PROMPT)
    assert result.error is None and result.tokens() == expected(PROMPT, 8)
    usage = [response.usage for response in result.responses]
    assert (usage[-1].drafted_tokens, usage[-1].accepted_draft_tokens) == (13, 6)
    assert [u.drafted_tokens for u in usage] == sorted(u.drafted_tokens for u in usage), "usage is cumulative"
    first, second = sorted(made.decodes, key=lambda worker: worker.submitted[0].id.attempt)
    prefill = made.prefills[0].address
    assert counted(made, prefill, first.address) == (4, 1) and counted(made, prefill, second.address) == (9, 5)
    await made.quiet()


async def test_without_drafts_nothing_is_said(pair: Cluster) -> None:
    result = await pair.generate(PROMPT)
    assert result.responses[-1].usage.drafted_tokens == 0
    assert "millrace_drafted_tokens_total{" not in (await pair.http.get("/metrics")).text
    answer = await pair.http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
    assert answer.json()["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


async def test_a_unified_worker_is_a_pair_without_a_prefill_worker(cluster: Callable) -> None:
    made = await cluster(FakeWorker(UNIFIED))
    made.workers[0].script.append(drafts(3, 3))
    await made.generate(PROMPT)
    assert counted(made, "none", made.workers[0].address) == (3, 3)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True])
async def test_openai_usage_sums_over_the_continuations(pair: Cluster, path: str, stream: bool) -> None:
    pair.decodes[0].script.extend([drafts(9, 5), drafts(6, 6)])
    prompt: dict[str, Any] = CHAT if "chat" in path else {"prompt": "hello"}
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    answer = await pair.http.post(path, json={**prompt, **options, "n": 2, "max_tokens": 8})
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.strip()]
    last = json.loads(lines[-2] if stream else answer.text)
    assert last["usage"]["completion_tokens"] == 16
    assert last["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 11,
        "rejected_prediction_tokens": 4,
    }


async def test_a_worker_that_is_gone_leaves_no_series(cluster: Callable) -> None:
    made = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE), FakeWorker(DECODE))
    for worker in made.decodes:
        worker.script.extend([drafts(2, 1)] * 8)
    while not all(worker.submitted for worker in made.decodes):
        await made.generate(PROMPT, sampling={"max_tokens": 2})
    prefill, gone = made.prefills[0].address, made.decodes[1].address
    staying = [Target(worker.address, worker.address) for worker in made.workers if worker.address != gone]
    made.router.registry.on_targets(staying)
    text = (await made.http.get("/metrics")).text
    series = f'millrace_drafted_tokens_total{{decode="{made.decodes[0].address}",prefill="{prefill}"}}'
    assert series in text and gone not in text
