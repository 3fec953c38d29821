"""`make cluster-test`: what it decides from the output of kubectl, and the objects that it makes."""

import json
from typing import Any

import pytest
from millrace_chart.render import objects, template
from millrace_cluster import decide, steps
from millrace_cluster.tools import Failed
from millrace_testing import kube_schema
from millrace_testing.charts import of_kind


def item(name: str, **notes: str) -> dict[str, Any]:
    return {"kind": "Pod", "metadata": {"name": name, "annotations": notes}}


def test_verdicts_name_what_failed_and_what_is_left() -> None:
    assert decide.verdict(f"a line\n{json.dumps({'sent': 4, 'failed': 0, 'reasons': []})}") == "4 requests, none failed"
    for log, said in (('{"sent": 4, "failed": 2, "reasons": ["503"]}', "2 of 4 requests failed: 503"), ("x", "read")):
        with pytest.raises(Failed, match=said):
            decide.verdict(log)
    kept = (item("test", **{"helm.sh/hook": "test"}), item("claim", **{"helm.sh/resource-policy": "keep"}))
    found = decide.left_behind([item("old")], [item("old"), item("new"), *kept])
    assert found == (["Pod/new"], ["Pod/claim", "Pod/test"])
    with pytest.raises(Failed, match="not of this test"):
        decide.check_free([{"metadata": {"name": "prod"}}])


@pytest.mark.helm
def test_changed_release_of_the_rollout_replaces_every_pod() -> None:
    before, after = (objects(template((), sets)) for sets in (steps.TWO, steps.CHANGED))
    old, new = (
        {it["metadata"]["name"]: it["spec"]["template"] for it in of_kind(x, "Deployment")} for x in (before, after)
    )
    assert len(old) == 3 and all(old[name] != new[name] for name in old)
    (router,) = (it for it in of_kind(before, "Deployment") if it["metadata"]["name"].endswith("-router"))
    load = decide.load(router, decide.address(of_kind(before, "Service")), "pass")["items"]
    (group,) = of_kind(encrypted := objects(template((steps.GROUPS,), ("tls.mode=generated",))), "LeaderWorkerSet")
    assert decide.address(of_kind(encrypted, "Service")) == "https://demo-millrace-router:8000"
    assert [problem for made in (*load, group) for problem in kube_schema.check(made)] == []
