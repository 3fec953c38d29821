"""The routers: admission, placement, their workers, and their own health."""

from __future__ import annotations

from millrace_dashboards.boards.common import quantiles
from millrace_dashboards.grafana import VIEW, Dashboard, Panel, Query, Row
from millrace_dashboards.promql import largest, ratio, total

ADMISSION = Row(
    "Admission",
    (
        Panel(
            "Queue",
            "Waiting requests, per router.",
            "short",
            (Query(total(VIEW.gauge("queued"), "pod"), "{{pod}}"),),
            stacked=True,
        ),
        Panel(
            "Estimated wait",
            "Time until the present queue will be served.",
            "s",
            (Query(largest(VIEW.gauge("queue_wait"), "pod"), "{{pod}}"),),
        ),
        Panel(
            "Requests by API",
            "Requests that ended.",
            "reqps",
            (Query(total(VIEW.rate("requests"), "api", "status"), "{{api}} {{status}}"),),
        ),
        Panel(
            "Requests by tenant",
            "Tenants are the names in the key file.",
            "reqps",
            (Query(total(VIEW.rate("tenant_requests"), "tenant", "status"), "{{tenant}} {{status}}"),),
        ),
        Panel(
            "Tokens by tenant",
            "Prompt and output tokens.",
            "ops",
            (Query(total(VIEW.rate("tenant_tokens"), "tenant", "direction"), "{{tenant}} {{direction}}"),),
        ),
        Panel(
            "Active requests",
            "Admitted and not ended, per router.",
            "short",
            (Query(total(VIEW.gauge("active"), "pod"), "{{pod}}"),),
            stacked=True,
        ),
    ),
)
PLACEMENT = Row(
    "Placement",
    (
        Panel(
            "Ways",
            "`pair`: prefill and decode; `prefill_only`: one token is wanted; `local`: decode alone; `unified`.",
            "ops",
            (Query(total(VIEW.rate("decisions"), "way"), "{{way}}"),),
            stacked=True,
        ),
        Panel(
            "Retries",
            "Share of the attempts, by the reason of the failed one.",
            "percentunit",
            (
                Query(
                    f"{total(VIEW.rate('retries'), 'reason')} / scalar({total(VIEW.rate('decisions'))})", "{{reason}}"
                ),
            ),
            stacked=True,
            alerts=("Retries",),
        ),
        Panel(
            "Cached prompt tokens",
            "Cached tokens that routers expected, and those that prefill workers had.",
            "ops",
            (
                Query(total(VIEW.rate("expected_cached_tokens")), "expected"),
                Query(total(VIEW.rate("engine", what="cached_tokens", component="prefill")), "prefill"),
            ),
        ),
        Panel(
            "Cache feeds",
            "Workers whose prefix caches are followed (by `kv_aware`), what was received, and gaps in it.",
            "short",
            (
                Query(total(VIEW.gauge("cache_feeds")), "feeds"),
                Query(total(VIEW.gauge("cache_blocks")), "blocks"),
                Query(total(VIEW.rate("cache_snapshots")), "snapshots/s"),
                Query(total(VIEW.rate("cache_gaps")), "gaps/s"),
            ),
        ),
        Panel(
            "Stale messages",
            "Messages of workers with a stale attempt number.",
            "ops",
            (Query(total(VIEW.rate("stale"), "kind"), "{{kind}}"),),
        ),
        Panel(
            "Drafts accepted by pair",
            "Share of drafts that became output tokens, by prefill → decode worker: the ten lowest pairs.",
            "percentunit",
            (
                Query(
                    "bottomk(10, "
                    + ratio(
                        total(VIEW.rate("accepted_draft_tokens"), "prefill", "decode"),
                        total(VIEW.rate("drafted_tokens"), "prefill", "decode"),
                    )
                    + ")",
                    "{{prefill}} → {{decode}}",
                ),
            ),
        ),
        Panel(
            "Token mismatches",
            "Prefill and decode disagreed on a token. Never normal.",
            "ops",
            (Query(total(VIEW.rate("mismatches"), "pod"), "{{pod}}"),),
            alerts=("TokenMismatches",),
        ),
    ),
)
RESILIENCE = Row(
    "Resilience",
    (
        Panel(
            "Retry budget",
            "Further attempts that each router would allow now, and attempts that it refused.",
            "short",
            (
                Query(total(VIEW.gauge("retries_left"), "pod"), "{{pod}} left"),
                Query(total(VIEW.rate("retries_refused"), "pod"), "{{pod}} refused/s"),
            ),
        ),
        Panel(
            "Ejected workers",
            "Workers that get no requests for a while, of the router that has ejected most.",
            "short",
            (Query(largest(VIEW.gauge("ejected"), "role"), "{{role}}"),),
            alerts=("WorkersShunned",),
        ),
        Panel(
            "Ejections",
            "For failures in a row.",
            "ops",
            (Query(total(VIEW.rate("ejections"), "role", "why"), "{{role}} {{why}}"),),
        ),
    ),
)
KNOWN_WORKERS = Row(
    "Workers as routers see them",
    (
        Panel(
            "Workers",
            "Discovered, healthy (answers and is linked), routable (warmed as a pair and not withheld).",
            "short",
            (
                Query(
                    largest(VIEW.gauge("workers", role="~prefill|decode|unified"), "role", "state"),
                    "{{role}} {{state}}",
                ),
            ),
        ),
        Panel(
            "Pairs",
            "By how far their hooks are.",
            "short",
            (Query(largest(VIEW.gauge("pairs"), "state"), "{{state}}"),),
            stacked=True,
        ),
        Panel(
            "Hooks",
            "Warm-ups, GC freezes and checks of their results.",
            "ops",
            (Query(total(VIEW.rate("hooks"), "hook", "outcome"), "{{hook}} {{outcome}}"),),
        ),
        Panel(
            "Age of discovery",
            "Time since the last list of workers from discovery. A static list comes once.",
            "s",
            (Query(f"time() - {largest(VIEW.gauge('discovery_synced'), 'pod')}", "{{pod}}"),),
            alerts=("DiscoveryStale",),
        ),
        Panel(
            "Discovered changes",
            "Workers that came, went, or changed in place.",
            "ops",
            (Query(total(VIEW.rate("discovery_changes"), "change"), "{{change}}"),),
        ),
        Panel(
            "Troubles of discovery",
            "Looks that failed: gone, silent, refused, failed.",
            "ops",
            (Query(total(VIEW.rate("discovery_troubles"), "kind"), "{{kind}}"),),
        ),
    ),
)
ITSELF = Row(
    "The process",
    (
        Panel(
            "Event-loop lag p99",
            "The time that every stream of this router waits for others.",
            "s",
            (Query(VIEW.quantile(0.99, "loop_lag", "pod", process="router"), "{{pod}}"),),
            alerts=("EventLoopLags",),
        ),
        Panel("Routing", "Checks, chat template, tokenization.", "s", quantiles(VIEW, "stage", stage="route")),
        Panel(
            "Changed files",
            "Certificates and API keys that were read again.",
            "ops",
            (Query(total(VIEW.rate("reloads"), "what", "outcome"), "{{what}} {{outcome}}"),),
        ),
        Panel(
            "Cached share expected",
            "Of the prompt tokens that were placed.",
            "percentunit",
            (
                Query(
                    ratio(total(VIEW.rate("expected_cached_tokens")), total(VIEW.rate("tokens", direction="prompt"))),
                    "expected",
                ),
            ),
        ),
        Panel(
            "Last start",
            "Of each router.",
            "dateTimeFromNow",
            (Query(f"{largest(VIEW.gauge('started', component='router'), 'pod')} * 1000", "{{pod}}"),),
            "stat",
        ),
    ),
)
DASHBOARD = Dashboard(
    "router",
    "Routers",
    "The routers: admission, placement, their workers, and their own health.",
    (ADMISSION, PLACEMENT, RESILIENCE, KNOWN_WORKERS, ITSELF),
    of="pairs",
)
