"""Recording rules: name → expression."""

from __future__ import annotations

from millrace_dashboards.promql import Scope, ratio, total

BY_POD = ("namespace", "pod")


def scaling(now: Scope) -> dict[str, str]:
    """What autoscalers read."""
    in_use = now.gauge("pages", use="~running|published")
    return {"millrace_kv_use_ratio": ratio(total(in_use, *BY_POD), total(now.gauge("pages"), *BY_POD))}


def vllm(now: Scope) -> dict[str, str]:
    """The load of each worker in vLLM's names, for dashboards and autoscalers that expect them."""
    waiting, running = (now.gauge("sequences", doing=doing) for doing in ("waiting", "running"))
    in_use, pages = now.gauge("pages", use="~running|published"), now.gauge("pages")
    by = (*BY_POD, "model_name")
    return {
        "vllm:num_requests_waiting": total(_named(waiting), *by),
        "vllm:num_requests_running": total(_named(running), *by),
        "vllm:kv_cache_usage_perc": ratio(total(_named(in_use), *by), total(_named(pages), *by)),
    }


def _named(vector: str) -> str:
    return f'label_replace({vector}, "model_name", "$1", "model", "(.*)")'
