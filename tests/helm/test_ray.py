"""Ray's token: a Secret of the release, or one that is given."""

import base64

import pytest
from millrace_chart.render import Object, objects, template
from millrace_testing.charts import GIVEN, of_kind, pods
from millrace_testing.group import SETS

pytestmark = pytest.mark.helm


def secrets(*sets: str) -> dict[str, Object]:
    """Without that of the routers (test_secret.py)."""
    found = of_kind(objects(template((), (*sets, GIVEN))), "Secret")
    return {item["metadata"]["name"]: item for item in found}


def tokens(*sets: str) -> list[Object]:
    """Where each pod of the group takes its token from."""
    found = []
    for name, pod in pods(objects(template((), (*SETS, *sets)))):
        if "LeaderWorkerSet" in name:
            (container,) = pod["containers"]
            found += [item["valueFrom"] for item in container["env"] if item["name"] == "RAY_AUTH_TOKEN"]
    return found


def test_group_has_a_token_that_nobody_knows() -> None:
    made = secrets(*SETS)["demo-millrace-ray"]["data"]["token"]
    assert (
        len(base64.b64decode(made)) == 48
        and made != secrets(*SETS, "logLevel=DEBUG")["demo-millrace-ray"]["data"]["token"]
    )
    assert tokens() == [{"secretKeyRef": {"name": "demo-millrace-ray", "key": "token"}}] * 2


def test_given_token_is_taken_and_none_is_made() -> None:
    own = ("ray.auth.secretName=ours", "ray.auth.key=ray")
    assert secrets(*SETS, *own) == {}
    assert tokens(*own) == [{"secretKeyRef": {"name": "ours", "key": "ray"}}] * 2


def test_workers_of_one_pod_need_no_token() -> None:
    assert secrets() == {}
