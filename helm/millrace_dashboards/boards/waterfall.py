"""The stages of a request, one after the other: which of them has become slow?"""

from __future__ import annotations

from millrace_dashboards.boards.common import quantiles
from millrace_dashboards.grafana import VIEW, Dashboard, Panel, Query, Row
from millrace_dashboards.promql import total

STAGES = {  # in the order in which a request passes them
    "route": "Checks, chat template and tokenization in the router.",
    "queue": "In the router's queue, until there are workers for it.",
    "prefill": "From the submit to the first token: transport, the prefill worker's queue, and computing the prompt.",
    "kv_transfer": "From the prefill worker's token to the decode worker's first output.",
    "decode": "From there to the end of the answer.",
}
PARTS = "~" + "|".join(STAGES)
BEFORE_FIRST = "~route|queue|prefill"

WHOLE = Row(
    "All stages",
    (
        Panel(
            "Where the time goes (median)",
            "One bar per stage. Their sum is the time of a typical request.",
            "s",
            tuple(Query(VIEW.quantile(0.5, "stage", stage=stage), stage) for stage in STAGES),
            "bargauge",
            width=8,
        ),
        Panel(
            "Mean time by stage",
            "Stacked: the height is the mean time of a request.",
            "s",
            (Query(VIEW.mean("stage", "stage", stage=PARTS), "{{stage}}"),),
            width=8,
            stacked=True,
        ),
        Panel(
            "Seconds before the first token, spent per second",
            "Stacked: how many requests are in each stage before their first token, on average.",
            "short",
            (Query(total(VIEW.observed("stage", "sum", stage=BEFORE_FIRST), "stage"), "{{stage}}"),),
            width=8,
            stacked=True,
        ),
    ),
)
EACH = Row(
    "Each stage",
    tuple(
        Panel(stage, description, "s", quantiles(VIEW, "stage", stage=stage))
        for stage, description in (*STAGES.items(), ("first_token", "route + queue + prefill: what a client waits."))
    ),
)
SPREAD = Row(
    "Spread",
    tuple(
        Panel(
            f"{stage} (all requests)",
            f"How many requests took how long. {description}",
            "s",
            (Query(total(VIEW.observed("stage", "bucket", stage=stage), "le"), "{{le}}"),),
            "heatmap",
            width=12,
        )
        for stage, description in (("first_token", "Time to first token."), ("kv_transfer", STAGES["kv_transfer"]))
    ),
)
DASHBOARD = Dashboard(
    "waterfall",
    "Stages",
    "The stages of a request, one after the other: which of them has become slow?",
    (WHOLE, EACH, SPREAD),
)
