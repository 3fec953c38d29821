"""The secret behind the salts of tenants: one for all routers, made by the chart or given."""

import base64

import pytest
from millrace_chart.render import Object, objects, template
from millrace_common.deployment_secret import LEAST_BYTES
from millrace_router.config import RouterConfig
from millrace_testing.charts import config_of, of_kind

pytestmark = pytest.mark.helm


def release(*sets: str, which: str = "helm") -> list[Object]:
    return objects(template((), sets, which))


def secret_of_routers(items: list[Object]) -> tuple[str, str]:
    """The Secret and its key, as the configuration of a router finds them in its pod."""
    [deployment] = [item for item in of_kind(items, "Deployment") if item["metadata"]["name"] == "demo-millrace-router"]
    pod = deployment["spec"]["template"]["spec"]
    path = RouterConfig.model_validate(config_of(items, "demo-millrace-router")).secret
    assert path is not None
    [mount] = [it for it in pod["containers"][0]["volumeMounts"] if it["mountPath"] == str(path.parent)]
    [volume] = [it["secret"] for it in pod["volumes"] if it["name"] == mount["name"]]
    assert mount["readOnly"] and volume["defaultMode"] == 0o440
    return volume["secretName"], path.name


@pytest.mark.parametrize("which", ["helm", pytest.param("oldest", marks=pytest.mark.helm("oldest"))])
def test_routers_have_a_secret_that_nobody_knows(which: str) -> None:
    items = release(which=which)
    [made] = of_kind(items, "Secret")
    assert secret_of_routers(items) == (made["metadata"]["name"], "key") == ("demo-millrace-secret", "key")
    text = base64.b64decode(made["data"]["key"])
    assert len(text) >= max(LEAST_BYTES, 32)
    [again] = of_kind(release("logLevel=DEBUG", which=which), "Secret")
    assert again["data"]["key"] != made["data"]["key"]


def test_given_secret_is_taken_and_none_is_made() -> None:
    items = release("secret.secretName=ours", "secret.key=salt")
    assert of_kind(items, "Secret") == [] and secret_of_routers(items) == ("ours", "salt")
