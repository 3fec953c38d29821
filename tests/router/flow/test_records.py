"""What of a request is recorded: drafts in its usage and in metrics, and its spans."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from millrace.v1 import worker_pb2
from millrace_common.spans import OFF, Tracing
from millrace_common.tracing import checked, make
from millrace_common.tracing_otel import OtelTracer, provider
from millrace_router.discovery.base import Target
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from router.fake_worker import (
    DECODE,
    PREFILL,
    UNIFIED,
    FakeWorker,
    Outputs,
    behaviour,
    expected,
    fails,
    failure,
    normal,
    output,
)
from router.harness import Cluster

PROMPT = [10, 20, 30]
CHAT = {"messages": [{"role": "user", "content": "hello"}]}


@behaviour
async def drafts(
    worker: FakeWorker, request: worker_pb2.EngineRequest, drafted: int, accepted: int, fails_after: int | None = None
) -> Outputs:
    """Says so with its last output, which is an error after `fails_after` tokens."""
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


def counted(made: Cluster, prefill: str, decode: str) -> tuple[float, float]:
    pair = {"prefill": prefill, "decode": decode}
    names = ("millrace_drafted_tokens_total", "millrace_accepted_draft_tokens_total")
    return made.metric(names[0], **pair), made.metric(names[1], **pair)


@behaviour
async def cached(worker: FakeWorker, request: worker_pb2.EngineRequest, host: int, fetched: int) -> Outputs:
    async for out in normal(worker, request):
        out.host_cached_tokens, out.fetched_tokens = host, fetched
        yield out


async def test_usage_says_where_cached_tokens_came_from(cluster: Callable) -> None:
    made = await cluster(FakeWorker(UNIFIED))
    made.workers[0].script.append(cached(2, 1))
    usage = [response.usage for response in (await made.generate(PROMPT)).responses]
    assert {(u.host_cached_prompt_tokens, u.fetched_prompt_tokens) for u in usage} == {(2, 1)}


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


# ------------------------------------------------------------------------------------- spans


TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
BODY = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "seed": 0}


def traced(made: Cluster, sample: float = 1.0) -> InMemorySpanExporter:
    exporter, made_provider = InMemorySpanExporter(), provider(Tracing(sample=sample), "millrace-router", "r")
    made_provider.add_span_processor(SimpleSpanProcessor(exporter))
    object.__setattr__(made.router.inference.backend, "tracer", OtelTracer(made_provider))
    return exporter


async def post(made: Cluster, status: int = 200, **headers: str) -> None:
    assert (await made.http.post("/v1/completions", json=BODY, headers=headers)).status_code == status
    await made.quiet()


def named(exporter: InMemorySpanExporter, name: str) -> list[ReadableSpan]:
    return [span for span in exporter.get_finished_spans() if span.name == name]


def hexes(span: ReadableSpan) -> tuple[str, str]:
    return f"{span.context.trace_id:032x}", f"{span.context.span_id:016x}"


async def test_a_request_has_spans_from_its_caller_to_its_workers(cluster: Callable) -> None:
    made: Cluster = await cluster(FakeWorker(PREFILL), FakeWorker(DECODE))
    exporter = traced(made)
    await post(made, traceparent=TRACEPARENT)
    (root,), (attempt,) = named(exporter, "generate"), named(exporter, "attempt")
    assert hexes(root)[0] == TRACEPARENT.split("-")[1] and f"{root.parent.span_id:016x}" == TRACEPARENT.split("-")[2]
    below = [span for name in ("route", "queue", "attempt") for span in named(exporter, name)]
    assert [span.parent.span_id for span in below] == [root.context.span_id] * 3
    assert root.attributes["millrace.api"] == "http" and root.attributes["millrace.status"] == "ok"
    assert attempt.attributes["millrace.route.prefill"] == f"{made.prefills[0].address}/0"
    assert [event.name for event in attempt.events] == ["first_token"]
    for worker in made.workers:
        assert worker.submitted[-1].traceparent.split("-")[1:3] == list(hexes(attempt))
    assert all(span.start_time <= span.end_time for span in exporter.get_finished_spans())


async def test_a_retry_is_another_attempt(cluster: Callable) -> None:
    made: Cluster = await cluster(FakeWorker(UNIFIED), FakeWorker(UNIFIED))
    exporter = traced(made)
    for worker in made.workers:
        worker.script.append(fails("WORKER_LOST", after=1))
    result = await made.generate([1, 2, 3], sampling={"max_tokens": 4})
    assert result.tokens() == expected([1, 2, 3], 4)
    await made.quiet()
    attempts = named(exporter, "attempt")
    assert [span.attributes["millrace.attempt"] for span in attempts] == [0, 1, 2]
    assert [bool(span.status.description) for span in attempts] == [True, True, False]
    assert len(named(exporter, "queue")) == 3 and len({span.parent.span_id for span in attempts}) == 1


async def test_a_refused_request_has_a_span_that_says_why(cluster: Callable) -> None:
    made: Cluster = await cluster(FakeWorker(UNIFIED))
    exporter = traced(made)
    answer = await made.http.post("/v1/completions", json=BODY | {"prompt": [10**6]})
    assert answer.status_code == 400
    (root,) = exporter.get_finished_spans()
    assert root.name == "generate" and "INVALID_ARGUMENT" in root.status.description


@pytest.mark.parametrize(("flags", "spans"), [("00", 0), ("01", 4)])
async def test_the_callers_choice_to_sample_is_kept(cluster: Callable, flags: str, spans: int) -> None:
    made: Cluster = await cluster(FakeWorker(UNIFIED))
    exporter = traced(made, sample=1.0 if flags == "00" else 0.0)
    await post(made, traceparent=TRACEPARENT[:-2] + flags)
    assert len(exporter.get_finished_spans()) == spans
    assert made.workers[0].submitted[-1].traceparent.endswith(flags)


async def test_without_tracing_the_context_is_handed_on(cluster: Callable) -> None:
    made: Cluster = await cluster(FakeWorker(UNIFIED))
    assert made.router.inference.backend.tracer is OFF is make(Tracing(), "a", "b")
    await post(made, traceparent=TRACEPARENT)
    assert made.workers[0].submitted[-1].traceparent == TRACEPARENT
    await post(made, traceparent="00-zz")
    assert made.workers[0].submitted[-1].traceparent == ""


@pytest.mark.parametrize(
    "text",
    ["", "x", TRACEPARENT + "-00", TRACEPARENT.upper(), "00-" + "0" * 32 + TRACEPARENT[35:], "ff" + TRACEPARENT[2:]],
)
def test_what_is_no_trace_context(text: str) -> None:
    assert checked(text) == "" and checked(TRACEPARENT) == TRACEPARENT
