"""The workers of one role or of all: life, work, drafts, memory."""

from __future__ import annotations

from millrace_dashboards.grafana import ROLE_VIEW as VIEW
from millrace_dashboards.grafana import Dashboard, Panel, Query, Row
from millrace_dashboards.promql import largest, ratio, total

LIFE = Row(
    "Life",
    (
        Panel(
            "States",
            "Workers in each state. `draining` ends within the drain time; `paused` when an operator resumes.",
            "short",
            (Query(total(VIEW.gauge("state"), "component", "state"), "{{component}} {{state}}"),),
            stacked=True,
        ),
        Panel(
            "Weights",
            "Workers with each version of the weights. Workers of different versions do not pair.",
            "short",
            (Query(total(VIEW.gauge("weights"), "component", "version"), "{{component}} {{version}}"),),
            stacked=True,
        ),
        Panel(
            "Start-up phases",
            "The slowest worker of the role. A long `compile` means that the folder of compile caches is not kept.",
            "s",
            (Query(largest(VIEW.gauge("startup"), "component", "phase"), "{{component}} {{phase}}"),),
            "bargauge",
        ),
        Panel(
            "Compilations after READY",
            "Kernels that a request waited for; 0 is right. The worker's log names them.",
            "short",
            (Query(total(VIEW.increase("compilations"), "component", "library"), "{{component}} {{library}}"),),
        ),
        Panel(
            "Last start",
            "Of each worker.",
            "dateTimeFromNow",
            (Query(f"{largest(VIEW.gauge('started', component='~prefill|decode|unified'), 'pod')} * 1000", "{{pod}}"),),
            "stat",
        ),
    ),
)
WORK = Row(
    "Work",
    (
        Panel(
            "Sequences",
            "running: in the batch; waiting: no pages yet; importing: KV on its way; exporting: parked.",
            "short",
            (Query(total(VIEW.gauge("sequences"), "component", "doing"), "{{component}} {{doing}}"),),
            stacked=True,
        ),
        Panel(
            "Running sequences per worker",
            "An uneven picture: see the routers' policies.",
            "short",
            (Query(total(VIEW.gauge("sequences", doing="running"), "pod"), "{{pod}}"),),
        ),
        Panel(
            "Credits",
            "Further requests that each worker takes now.",
            "short",
            (Query(total(VIEW.gauge("credits"), "pod"), "{{pod}}"),),
        ),
        Panel(
            "Tokens",
            "Of admitted prompts, from the prefix cache, and generated.",
            "ops",
            (
                Query(
                    total(VIEW.rate("engine", what="~prompt_tokens|cached_tokens|output_tokens"), "component", "what"),
                    "{{component}} {{what}}",
                ),
            ),
        ),
        Panel(
            "Tokens per step",
            "Generated tokens per engine step: a decode worker's mean batch times its accept length.",
            "short",
            (
                Query(
                    ratio(
                        total(VIEW.rate("engine", what="output_tokens"), "pod"),
                        total(VIEW.rate("engine", what="steps"), "pod"),
                    ),
                    "{{pod}}",
                ),
            ),
        ),
        Panel(
            "Steps",
            "Of each worker's engines.",
            "ops",
            (Query(total(VIEW.rate("engine", what="steps"), "pod"), "{{pod}}"),),
        ),
    ),
)
DRAFTS = Row(
    "Drafts",
    (
        Panel(
            "Accepted by place",
            "Share of verified drafts that became output tokens. 1 is the draft right behind the last token.",
            "percentunit",
            (
                Query(
                    ratio(total(VIEW.rate("drafts_accepted"), "position"), total(VIEW.rate("drafts"), "position")),
                    "draft {{position}}",
                ),
            ),
        ),
        Panel(
            "Accept length",
            "Tokens per sequence and step that had drafts: 1 + accepted ones. Near 1: drafts only cost time.",
            "short",
            (
                Query(
                    "1 + "
                    + ratio(
                        total(VIEW.rate("drafts_accepted"), "pod"), total(VIEW.rate("drafts", position="1"), "pod")
                    ),
                    "{{pod}}",
                ),
            ),
        ),
        Panel(
            "Drafts verified",
            "By place. Large batches have fewer drafts per sequence, or none (`limits.draft_batches`).",
            "ops",
            (Query(total(VIEW.rate("drafts"), "position"), "draft {{position}}"),),
            stacked=True,
        ),
    ),
)
EXPERTS = Row(
    "Experts",
    (
        Panel(
            "Imbalance",
            "Choices on the busiest rank over the mean rank, mean of the layers. 1: even. For `spare_experts`.",
            "short",
            (Query(largest(VIEW.gauge("expert_imbalance"), "pod"), "{{pod}}"),),
        ),
        Panel(
            "Moves",
            "Experts that changed their place.",
            "ops",
            (Query(total(VIEW.rate("expert_moves"), "pod"), "{{pod}}"),),
        ),
    ),
)
MEMORY = Row(
    "Memory",
    (
        Panel(
            "KV pages",
            "free, cached (could be taken), published (parked prompts), running.",
            "short",
            (Query(total(VIEW.gauge("pages"), "component", "use"), "{{component}} {{use}}"),),
            stacked=True,
        ),
        Panel(
            "KV pages in use per worker",
            "Share that is neither free nor evictable from the prefix cache. Decode scales by it.",
            "percentunit",
            (
                Query(
                    ratio(
                        total(VIEW.gauge("pages", use="~running|published"), "pod"), total(VIEW.gauge("pages"), "pod")
                    ),
                    "{{pod}}",
                ),
            ),
        ),
        Panel(
            "Prompt tokens to be computed",
            "Per worker. Prefill scales by it.",
            "short",
            (Query(total(VIEW.gauge("waiting_tokens"), "pod"), "{{pod}}"),),
        ),
        Panel(
            "Prefix cache",
            "Share of admitted prompt tokens that were in the worker's own cache.",
            "percentunit",
            (
                Query(
                    ratio(
                        total(VIEW.rate("engine", what="cached_tokens"), "component"),
                        total(VIEW.rate("engine", what="prompt_tokens"), "component"),
                    ),
                    "{{component}}",
                ),
            ),
        ),
        Panel(
            "Preemptions",
            "Sequences that gave their pages back and start again. Many: too few pages for the admitted requests.",
            "ops",
            (Query(total(VIEW.rate("engine", what="preemptions"), "pod"), "{{pod}}"),),
        ),
        Panel(
            "Event-loop lag p99",
            "Of the frontends.",
            "s",
            (Query(VIEW.quantile(0.99, "loop_lag", "pod", process="frontend"), "{{pod}}"),),
            alerts=("EventLoopLags",),
        ),
    ),
)
HOST_TIER = Row(
    "Host tier",
    (
        Panel(
            "Prefix cache by tier",
            "Share of admitted prompt tokens that came from copies in the host's memory; above: from any tier.",
            "percentunit",
            tuple(
                Query(
                    ratio(
                        total(VIEW.rate("engine", what=what), "component"),
                        total(VIEW.rate("engine", what="prompt_tokens"), "component"),
                    ),
                    f"{{{{component}}}} {legend}",
                )
                for what, legend in (("cached_tokens", "any tier"), ("host_cached_tokens", "host"))
            ),
        ),
        Panel(
            "Copies of pages",
            "Room in the host's memory, per use. No free ones: the copies used longest ago are dropped.",
            "short",
            (Query(total(VIEW.gauge("host_pages"), "component", "use"), "{{component}} {{use}}"),),
            stacked=True,
        ),
        Panel(
            "Bytes copied",
            "To the host (store) and back (load).",
            "Bps",
            (Query(total(VIEW.rate("host_bytes"), "component", "way"), "{{component}} {{way}}"),),
        ),
        Panel(
            "Pages to and from the folder",
            "Copies stored in the folder below the host's memory, and loaded from it.",
            "short",
            (Query(total(VIEW.rate("disk_pages"), "component", "way"), "{{component}} {{way}}"),),
        ),
        Panel(
            "Bytes per second of a copy",
            "Mean of the copies, while they are under way.",
            "Bps",
            (
                Query(
                    ratio(total(VIEW.rate("host_bytes"), "pod", "way"), total(VIEW.rate("host_seconds"), "pod", "way")),
                    "{{pod}} {{way}}",
                ),
            ),
        ),
        Panel(
            "Time of copies",
            "Share of the time in which pages were copied.",
            "percentunit",
            (Query(total(VIEW.rate("host_seconds"), "pod", "way"), "{{pod}} {{way}}"),),
        ),
        Panel(
            "Preempted sequences",
            "Those that went on with the pages they had (resumed), and those that were computed again.",
            "ops",
            (Query(total(VIEW.rate("engine", what="~resumed|recomputed"), "what"), "{{what}}"),),
        ),
    ),
)
DASHBOARD = Dashboard(
    "workers",
    "Workers",
    "The workers of one role or of all: life, work, drafts, memory.",
    (LIFE, WORK, DRAFTS, EXPERTS, MEMORY, HOST_TIER),
    variables=("role", "pod"),
    of="state",
)
