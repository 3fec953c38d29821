"""The Role has every call that discovery makes, and no other."""

import asyncio
from typing import Any

import pytest
from millrace_chart.render import NAMESPACE
from millrace_router.config import KubernetesConfig
from millrace_router.discovery import kubernetes
from millrace_testing.charts import of_kind, rendered
from millrace_testing.kube_server import KubeServer

pytestmark = pytest.mark.helm
Call = tuple[str, str, str]  # verb, API group, resource


class Recorder(KubeServer):
    """Writes down what is asked as an authorizer sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[Call] = set()
        self.watched = asyncio.Event()

    async def _serve(self, request: Any) -> Any:
        parts = request.url.path.strip("/").split("/")
        group = "" if parts[0] == "api" else parts[1]
        watching = request.query_params.get("watch", "").lower() == "true"
        verb = {"GET": "watch" if watching else "list"}.get(request.method, request.method)
        self.calls.add((verb, group, parts[-1]))
        if watching:
            self.watched.set()
        return await super()._serve(request)


class Nobody:
    def on_targets(self, targets: object) -> None: ...

    def on_trouble(self, kind: str) -> None:
        raise AssertionError(kind)


@pytest.mark.parametrize("objects", ["pods", "endpointslices"])
async def test_role_is_what_discovery_calls(objects: str) -> None:
    items = rendered("cpu-tiny", f"discovery.objects={objects}")
    async with Recorder() as server:
        config = KubernetesConfig.model_validate({"objects": objects, "selector": "app=millrace", "api": server.url})
        source = kubernetes.KubernetesSource(config)
        source.start(Nobody())
        await server.watched.wait()
        await source.stop()
    (role,) = of_kind(items, "Role")
    granted = {
        (verb, group, resource)
        for rule in role["rules"]
        for verb in rule["verbs"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
    }
    assert granted == server.calls


def test_account_of_routers_has_the_role_in_its_namespace_alone() -> None:
    items = rendered("cpu-tiny")
    (binding,) = of_kind(items, "RoleBinding")
    (role,) = of_kind(items, "Role")
    (deployment,) = (it for it in of_kind(items, "Deployment") if it["metadata"]["name"] == "demo-millrace-router")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (account,) = of_kind(items, "ServiceAccount")
    name = deployment["spec"]["template"]["spec"]["serviceAccountName"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": name, "namespace": NAMESPACE}]
    assert account["metadata"]["name"] == name and account["automountServiceAccountToken"] is False
    assert not of_kind(items, "ClusterRole", "ClusterRoleBinding")
