"""The router's metrics: rows of the catalogue, updated when requests and stages end."""

import asyncio
from collections.abc import Callable, Set

from millrace_common.metrics import PAIR, PROCESS, ROUTER, Metrics
from prometheus_client import CollectorRegistry, Counter

from millrace_router.flow.flow import Stage
from millrace_router.flow.generation import NO_WORKER, Generation


def build() -> Metrics:
    metrics = Metrics((*ROUTER, *PROCESS), CollectorRegistry())
    metrics.started.set_to_current_time()
    return metrics


def forget_tenants(metrics: Metrics, known: Set[str]) -> None:
    """Drop the series of tenants that left the key file, which changes while the process runs."""
    for counter in (metrics.tenant_requests, metrics.tenant_tokens):
        _keep(counter, lambda labels: labels["tenant"] in known)


def forget_workers(metrics: Metrics, known: Set[str]) -> None:
    """Drop the series of pairs with a worker that discovery no longer lists. `known` are addresses."""
    for row in ROUTER:
        if row.labels == PAIR:
            _keep(getattr(metrics, row.attr), lambda labels: {*labels.values()} - {NO_WORKER} <= known)


def _keep(counter: Counter, wanted: Callable[[dict[str, str]], bool]) -> None:
    samples = [sample for family in counter.collect() for sample in family.samples]
    for values in {tuple(sample.labels.values()) for sample in samples if not wanted(sample.labels)}:
        counter.remove(*values)


def observe_generation(metrics: Metrics, generation: Generation) -> None:
    """Observe the stages that a continuation reached before it ended. The stage in which it ended counts until now, so
    that a deadline or a fault shows where the time went.
    """
    now = asyncio.get_running_loop().time()
    began, received = generation.flow.began, generation.job.received
    spans = {
        "route": (received, began[Stage.QUEUED]),
        "queue": (began[Stage.QUEUED], began.get(Stage.PREFILL)),
        "prefill": (began.get(Stage.PREFILL), generation.tokens_at),
        "kv_transfer": (began.get(Stage.HANDOVER), began.get(Stage.DECODE)),
        "first_token": (received, generation.tokens_at),
        "decode": (began.get(Stage.DECODE), now),
        "total": (received, now),
    }
    for stage, (start, end) in spans.items():
        if start is not None:
            metrics.stage.labels(stage=stage).observe(max((now if end is None else end) - start, 0.0))
    metrics.tokens.labels(direction="output").inc(len(generation.flow.outputs))
