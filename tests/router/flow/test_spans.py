"""The spans of requests as the router records them, and what it tells the workers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pytest
from millrace_common.spans import OFF, Tracing
from millrace_common.tracing import checked, make
from millrace_common.tracing_otel import OtelTracer, provider
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from router.fake_worker import DECODE, PREFILL, UNIFIED, FakeWorker, expected, fails
from router.harness import Cluster

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


async def test_one_request(cluster: Callable) -> None:
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


async def test_the_loops_lag_is_seen(cluster: Callable) -> None:
    made: Cluster = await cluster(FakeWorker(UNIFIED))
    seen = lambda: made.metric("millrace_event_loop_lag_seconds_count", process="router")  # noqa: E731
    before = seen()
    await made.until(lambda: seen() > before)
    total = made.metric("millrace_event_loop_lag_seconds_sum", process="router")
    asyncio.get_running_loop().call_soon(_block)
    await made.until(lambda: made.metric("millrace_event_loop_lag_seconds_sum", process="router") > total + 0.1)


def _block() -> None:
    """Like a callback that computes for too long."""
    time.sleep(0.3)
