"""From prefill to decode: how fast pages travel, what holds them, what fails."""

from __future__ import annotations

from millrace_dashboards.boards.common import quantiles
from millrace_dashboards.grafana import VIEW, Dashboard, Panel, Query, Row
from millrace_dashboards.promql import ratio, total

SPEED = Row(
    "Speed",
    (
        Panel(
            "KV bytes",
            "Read from other workers, per worker.",
            "Bps",
            (Query(total(VIEW.rate("kv_bytes"), "pod"), "{{pod}}"),),
        ),
        Panel(
            "Bytes per second of a read",
            "Mean of one read, with others beside it. RDMA: tens of GB/s; below 5 GB/s it is likely TCP.",
            "Bps",
            (
                Query(
                    ratio(total(VIEW.rate("kv_bytes"), "pod"), total(VIEW.observed("kv_read", "sum"), "pod")), "{{pod}}"
                ),
            ),
            alerts=("KvSlow",),
        ),
        Panel("One read", "From a read's posting to its end on all ranks.", "s", quantiles(VIEW, "kv_read")),
        Panel(
            "After the last part",
            "From the arrival of a prompt's last part to the proof that its pages were held: what is not hidden behind "
            "prefill.",
            "s",
            quantiles(VIEW, "kv_transfer"),
        ),
        Panel(
            "Seen by the router",
            "From the prefill worker's token to the decode worker's first output.",
            "s",
            quantiles(VIEW, "stage", stage="kv_transfer"),
        ),
        Panel(
            "Transfers",
            "Prompts whose KV arrived, per decode worker.",
            "ops",
            (Query(total(VIEW.observed("kv_transfer", "count"), "pod"), "{{pod}}"),),
        ),
    ),
)
HELD = Row(
    "What is held",
    (
        Panel(
            "Leases",
            "Parked prompts and loans, per worker. More than there are requests: no decode worker fetches them.",
            "short",
            (Query(total(VIEW.gauge("leases"), "pod"), "{{pod}}"),),
        ),
        Panel(
            "Published pages",
            "Pages of parked prompts and of loans, per worker.",
            "short",
            (Query(total(VIEW.gauge("pages", use="published"), "pod"), "{{pod}}"),),
        ),
        Panel(
            "Quarantine",
            "Pages of failed transfers with a read that is still in flight. They come back when it ends.",
            "short",
            (Query(total(VIEW.gauge("quarantined"), "pod"), "{{pod}}"),),
            alerts=("PagesInQuarantine",),
        ),
    ),
)
LOANS = Row(
    "Loans",
    (
        Panel(
            "Pages on their way back",
            "Cached pages that prefill workers borrowed instead of computing them, and that workers lent.",
            "ops",
            (Query(total(VIEW.rate("loan_pages"), "direction", "pod"), "{{direction}} {{pod}}"),),
        ),
        Panel(
            "One loan",
            "From asking the lender to held, without the time in the prefill worker's queue.",
            "s",
            quantiles(VIEW, "loan"),
        ),
        Panel(
            "Loans without pages",
            "By reason; the prompt was computed instead. `KV_NOT_FOUND`: evicted meanwhile.",
            "ops",
            (Query(total(VIEW.rate("loan_failures"), "reason"), "{{reason}}"),),
            stacked=True,
        ),
    ),
)
FAILURES = Row(
    "Failures",
    (
        Panel(
            "Failed transfers",
            "By reason; `CANCELLED` and `WORKER_LOST` have their cause elsewhere.",
            "ops",
            (Query(total(VIEW.rate("kv_failures"), "reason"), "{{reason}}"),),
            stacked=True,
        ),
        Panel(
            "Ended leases",
            "`released`: read and proven. `expired`: the decode worker was silent. `aborted`: by the router.",
            "ops",
            (Query(total(VIEW.rate("leases_ended"), "outcome"), "{{outcome}}"),),
            stacked=True,
        ),
        Panel(
            "Messages for unknown attempts",
            "Late or repeated messages that workers refused. Normal around cancellations and retries.",
            "ops",
            (Query(total(VIEW.rate("worker_stale"), "kind"), "{{kind}}"),),
        ),
    ),
)
DASHBOARD = Dashboard(
    "kv-transfer",
    "KV transfer",
    "From prefill to decode: how fast pages travel, what holds them, what fails.",
    (SPEED, LOANS, HELD, FAILURES),
)
