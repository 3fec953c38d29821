"""The one catalogue of metrics: every name, unit, label and help text of the system.

A component builds a `Metrics` over its own registry and uses attributes: `metrics.requests.labels(status="ok").inc()`.
Names carry the prefix `millrace_` and a base unit; counters end in `_total`. Labels are bounded sets: the router drops
the series of tenants and workers that are gone. A series that begins at 1 has never increased for Prometheus; so
counters that alerts watch have `known` label values, which are 0 from the start.
"""

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from millrace_common.reasons import Reason

# The client for Python has no native histograms (0.26), so buckets grow by a factor of 2 to 2.5. A quantile above the
# last one is reported as the last one, so each histogram reaches what its limit allows.
_PAUSES = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_GAPS = (*_PAUSES, 25.0, 60.0)
_STAGES = (*_PAUSES[3:], 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 2400.0, 3600.0, 7200.0)
Labels = tuple[str, ...]
PAIR: Labels = ("prefill", "decode")  # addresses of workers
POSITION: Labels = ("replica", "position")  # behind the newest token of a sequence

KV_FAULTS = (  # reasons of kv_failures that neither a client nor a lost worker causes
    Reason.KV_EXPIRED,
    Reason.KV_MISMATCH,
    Reason.KV_NOT_FOUND,
    Reason.LAYOUT_MISMATCH,
    Reason.STALLED,
    Reason.TRANSFER_FAILED,
)


class QuickHistogram(Collector):
    """For events of every token: an observation takes 0.3 µs instead of 2, because it takes no lock. Without labels,
    and for one thread.
    """

    def __init__(
        self, name: str, help: str, labels: Sequence[str], *, registry: CollectorRegistry, buckets: Sequence[float]
    ) -> None:
        assert not labels
        self._name, self._help = name, help
        self._bounds = (*buckets, math.inf)
        self._counts = [0] * len(self._bounds)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        names = map(floatToGoString, self._bounds)
        buckets = list(zip(names, itertools.accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets=buckets, sum_value=self._sum)


@dataclass(frozen=True, slots=True)
class Metric:
    attr: str
    name: str
    kind: type[Counter] | type[Gauge] | type[Histogram] | type[QuickHistogram]
    help: str
    labels: Labels = ()
    buckets: tuple[float, ...] = ()
    known: tuple[Labels, ...] = ()  # label values, in the order of `labels`


def counter(attr: str, name: str, help: str, labels: Labels = (), known: tuple[Labels, ...] = ()) -> Metric:
    return Metric(attr, name, Counter, help, labels, known=known)


def gauge(attr: str, name: str, help: str, labels: Labels = ()) -> Metric:
    return Metric(attr, name, Gauge, help, labels)


def histogram(attr: str, name: str, help: str, buckets: tuple[float, ...], labels: Labels = ()) -> Metric:
    return Metric(attr, name, Histogram, help, labels, buckets)


ROUTER = (
    counter("requests", "millrace_requests_total", "Requests by how they ended.", ("api", "status")),
    histogram("stage", "millrace_stage_seconds", "Time of requests in each stage.", _STAGES, ("stage",)),
    Metric("itl", "millrace_inter_token_seconds", QuickHistogram, "Time between a stream's token batches.", (), _GAPS),
    counter("tokens", "millrace_tokens_total", "Tokens, by direction.", ("direction",)),
    gauge("queued", "millrace_queue_requests", "Requests that wait for workers."),
    gauge("queued_tokens", "millrace_queue_tokens", "Prompt tokens of waiting requests."),
    gauge("queue_wait", "millrace_queue_wait_seconds", "Estimated time until the queue is empty."),
    counter("tenant_requests", "millrace_tenant_requests_total", "Requests by API key.", ("tenant", "status")),
    counter("tenant_tokens", "millrace_tenant_tokens_total", "Tokens by API key.", ("tenant", "direction")),
    gauge("active", "millrace_active_requests", "Requests in the router, waiting ones included."),
    counter("retries", "millrace_retries_total", "Retries, by the reason of the failed attempt.", ("reason",)),
    counter("retries_refused", "millrace_retries_refused_total", "Retries that the retry budget refused."),
    gauge("retries_left", "millrace_retry_budget_attempts", "Retries that the retry budget allows now."),
    gauge("ejected", "millrace_ejected_workers", "Workers ejected after failures in a row.", ("role",)),
    counter("ejections", "millrace_ejections_total", "Ejections of workers after failures in a row.", ("role", "why")),
    gauge("workers", "millrace_workers", "Discovered, healthy and routable workers.", ("role", "state")),
    gauge("pairs", "millrace_pairs", "Pairs of workers by the stage of their warm-up.", ("state",)),
    gauge("discovery_synced", "millrace_discovery_last_sync_timestamp_seconds", "When discovery last listed workers."),
    counter("discovery_changes", "millrace_discovery_changes_total", "Changes of discovered workers.", ("change",)),
    counter("discovery_troubles", "millrace_discovery_troubles_total", "Discovery calls that failed.", ("kind",)),
    counter("warmups", "millrace_warmups_total", "Warm-up and GC-freeze calls to workers.", ("call", "outcome")),
    counter(
        "placements",
        "millrace_placements_total",
        "Attempts placed, by route: pair, prefill_only, local or unified.",
        ("route", "prefill_policy", "decode_policy"),
    ),
    counter("expected_cached_tokens", "millrace_expected_cached_tokens_total", "Prompt tokens expected to be cached."),
    gauge("duty", "millrace_duty", "1 for the duty of each flexible worker.", ("worker", "duty")),
    counter("duty_changes", "millrace_duty_changes_total", "Duties that this router set.", ("before", "after")),
    gauge(
        "goodput",
        "millrace_goodput_requests_per_second",
        "Requests within their SLOs: expected for all routers, measured for this one.",
        ("kind",),
    ),
    gauge("cache_feeds", "millrace_cache_feeds", "Workers whose cache events the router receives."),
    gauge("cache_blocks", "millrace_cache_blocks", "Distinct cached pages in the KV index."),
    counter("cache_snapshots", "millrace_cache_snapshots_total", "Prefix-cache snapshots received."),
    counter("cache_gaps", "millrace_cache_gaps_total", "Gaps in streams of cache events."),
    counter(
        "drafted_tokens",
        "millrace_drafted_tokens_total",
        "Draft tokens verified in ended attempts, by worker addresses.",
        PAIR,
    ),
    counter(
        "accepted_draft_tokens",
        "millrace_accepted_draft_tokens_total",
        "Draft tokens that became output tokens, by worker addresses.",
        PAIR,
    ),
    counter("stale", "millrace_stale_messages_total", "Messages of attempts that had ended.", ("kind",)),
    counter("mismatches", "millrace_token_mismatches_total", "Tokens on which prefill and decode workers disagreed."),
)
WORKER = (
    gauge("state", "millrace_worker_state", "1 for the worker's current state.", ("state",)),
    gauge("weights", "millrace_worker_weights_info", "1 for the version of the worker's weights.", ("version",)),
    gauge("startup", "millrace_startup_seconds", "Time of each phase of the start.", ("phase",)),
    counter(
        "compilations",
        "millrace_worker_compilations_total",
        "Kernels compiled after READY. Requests may have waited.",
        ("library",),
        known=(("triton",), ("deep_gemm",), ("flashinfer",)),
    ),
    gauge("sequences", "millrace_sequences", "Sequences by state.", ("replica", "doing")),
    gauge("pages", "millrace_kv_pages", "KV pages by use.", ("replica", "use")),
    gauge("waiting_tokens", "millrace_waiting_tokens", "Prompt tokens not yet computed.", ("replica",)),
    gauge("capacity", "millrace_capacity_requests", "Further requests that the replica can take.", ("replica",)),
    gauge("step_times", "millrace_step_times_seconds", "Measured parts of a step's time.", ("replica", "of")),
    gauge("host_pages", "millrace_host_pages", "Pages of the KV cache in host memory.", ("replica", "use")),
    counter("host_bytes", "millrace_host_bytes_total", "KV bytes copied to or from host memory.", ("replica", "way")),
    counter("host_seconds", "millrace_host_copy_seconds_total", "Time of host memory copies.", ("replica", "way")),
    counter("disk_pages", "millrace_disk_pages_total", "KV pages by disk operation.", ("replica", "way")),
    counter("engine", "millrace_engine_total", "Engine events: steps, tokens, preemptions.", ("replica", "what")),
    counter("drafted", "millrace_draft_tokens_total", "Draft tokens verified, by position.", POSITION),
    counter("accepted", "millrace_draft_tokens_accepted_total", "Draft tokens accepted.", POSITION),
    gauge("expert_imbalance", "millrace_expert_imbalance", "Routed tokens of the busiest rank over the ranks' mean."),
    counter("expert_moves", "millrace_expert_moves_total", "Experts that moved to another slot."),
    counter("kv_bytes", "millrace_kv_bytes_total", "KV bytes read from other workers."),
    histogram("kv_transfer", "millrace_kv_transfer_seconds", "Time from last KV chunk to confirmed release.", _GAPS),
    histogram("kv_read", "millrace_kv_read_seconds", "Time of a KV read on all ranks.", _GAPS),
    counter(
        "kv_failures",
        "millrace_kv_failures_total",
        "KV transfers that failed.",
        ("reason",),
        known=tuple((reason,) for reason in KV_FAULTS),
    ),
    counter("prefix_fetch_pages", "millrace_prefix_fetch_pages_total", "Cached pages sent or read.", ("direction",)),
    histogram("prefix_fetch", "millrace_prefix_fetch_seconds", "Prefix fetches, without time in the queue.", _GAPS),
    counter("prefix_fetch_failures", "millrace_prefix_fetch_failures_total", "Failed prefix fetches.", ("reason",)),
    gauge("leases", "millrace_leases", "Prompts held for transfer, and prefix fetches."),
    counter(
        "leases_ended",
        "millrace_leases_ended_total",
        "Leases by how they ended.",
        ("outcome",),
        known=(("released",), ("expired",), ("aborted",)),
    ),
    gauge("quarantined", "millrace_quarantined_pages", "Pages of failed imports that a read may still write."),
    counter("worker_stale", "millrace_worker_stale_messages_total", "Messages about ended attempts.", ("kind",)),
)
PROCESS = (
    gauge("started", "millrace_start_timestamp_seconds", "When the process started."),
    histogram("gc_pause", "millrace_gc_pause_seconds", "GC pauses.", _PAUSES, ("process", "generation")),
    histogram("loop_lag", "millrace_event_loop_lag_seconds", "Delay of the event loop.", _PAUSES, ("process",)),
    counter(
        "reloads",
        "millrace_reloads_total",
        "Reloads of certificates and API keys, by outcome.",
        ("what", "outcome"),
        known=(("certificates", "failed"), ("api_keys", "failed")),
    ),
    counter("gc_freezes", "millrace_gc_freezes_total", "Freezes of the garbage collector.", ("process",)),
    gauge("gc_frozen", "millrace_gc_frozen_objects", "Objects in the latest GC freeze.", ("process",)),
)
# Attribute → old name without `_total`. WORDS: old labels and values. Both are exported for one release.
RENAMED = {
    "capacity": "millrace_credits",
    "warmups": "millrace_hooks",
    "placements": "millrace_decisions",
    "prefix_fetch_pages": "millrace_loan_pages",
    "prefix_fetch": "millrace_loan_seconds",
    "prefix_fetch_failures": "millrace_loan_failures",
    "drafted": "millrace_drafts",
    "accepted": "millrace_drafts_accepted",
}
WORDS = {"call": "hook", "route": "way", "fetched": "borrowed", "served": "lent"}


class OldNames(Collector):
    """Exports renamed metrics under their old names too."""

    def __init__(self, metrics: "Metrics") -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Family]:
        for attr in RENAMED.keys() & vars(self._metrics):
            old, new = RENAMED[attr], next(iter(vars(self._metrics)[attr].collect()))
            family = Family(old, f"Deprecated: use {new.name}.", new.type)
            for name, labels, value, *_ in new.samples:
                labels = {WORDS.get(key, key): WORDS.get(it, it) for key, it in labels.items()}
                family.add_sample(old + name.removeprefix(new.name), labels, value)
            yield family


class Metrics:
    """The metrics of one component in one registry, one attribute each."""

    def __init__(self, rows: tuple[Metric, ...], registry: CollectorRegistry) -> None:
        self.registry = registry
        for row in rows:
            options: dict[str, Any] = {"buckets": row.buckets} if row.buckets else {}  # of a Histogram
            metric: Any = row.kind(row.name, row.help, row.labels, registry=registry, **options)  # of any kind
            for values in row.known:
                metric.labels(*values)
            setattr(self, row.attr, metric)
        registry.register(OldNames(self))

    def __getattr__(self, name: str) -> Any:  # only reached for names that no row defines
        raise AttributeError(f"no metric {name!r} in the catalogue")
