"""One signal for two pools: the number of each follows from it, so their ratio stays."""

from __future__ import annotations

import pytest
from millrace_dashboards.promql import CATALOGUE
from millrace_testing.charts import of_kind, rendered

QUERY = f'sum({CATALOGUE["active"].name}{{namespace="serving"}})'


@pytest.mark.helm
def test_two_pools_follow_one_query() -> None:
    at = [f"workers.{pool}.autoscaling" for pool in ("prefill", "decode")]
    query = QUERY.replace("{", r"\{").replace("}", r"\}").replace(",", r"\,")
    items = rendered("keda", *(f"{key}.query={query}" for key in at), f"{at[0]}.target=64", f"{at[1]}.target=32")
    triggers = {
        item["spec"]["scaleTargetRef"]["name"]: item["spec"]["triggers"][0]["metadata"]
        for item in of_kind(items, "ScaledObject")
    }
    assert {trigger["query"] for trigger in triggers.values()} == {QUERY}
    thresholds = {name.rsplit("-", 1)[1]: float(trigger["threshold"]) for name, trigger in triggers.items()}
    assert thresholds == {"prefill": 64, "decode": 32}
