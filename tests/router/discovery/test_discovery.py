"""Discovery without Kubernetes' HTTP: comparing targets, reading objects, configuration."""

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from millrace_router.config import KubernetesConfig, RouterConfig
from millrace_router.discovery.base import Target, diff, one_per_address
from millrace_router.discovery.factory import StaticSource
from millrace_router.discovery.objects import Store, of_pod, of_slice
from millrace_testing.kube_server import endpoint, endpoint_slice, pod

PODS = KubernetesConfig(selector="app=millrace")
SLICES = KubernetesConfig(selector="app=millrace", objects="endpointslices")
INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


class Heard:
    """A listener that remembers."""

    def __init__(self) -> None:
        self.targets: Sequence[Target] = ()
        self.times = 0
        self.troubles: list[str] = []
        self._news = asyncio.Event()

    def on_targets(self, targets: Sequence[Target]) -> None:
        self.targets, self.times = targets, self.times + 1
        self._news.set()

    def on_trouble(self, kind: str) -> None:
        self.troubles.append(kind)
        self._news.set()

    @property
    def addresses(self) -> list[str]:
        return sorted(target.address for target in self.targets)

    async def until(self, condition: object) -> None:
        while not condition():
            self._news.clear()
            await self._news.wait()


# ----------------------------------------------------------------------------------------- comparing

targets = st.builds(
    Target, st.sampled_from("abc"), st.sampled_from(["x:1", "y:1", "z:1"]), withheld=st.sampled_from(["", "no"])
)
listings = st.lists(targets, max_size=4, unique_by=lambda target: target.key)


@given(listings, listings)
def test_changes_lead_from_one_listing_to_the_next(before: list[Target], after: list[Target]) -> None:
    known = {target.key: target for target in before}
    changes = diff(known, after)
    for target in changes.removed:
        assert known.pop(target.key) == target
    for target in changes.added:
        assert target.key not in known
        known[target.key] = target
    for target in changes.updated:
        assert known[target.key].address == target.address and known[target.key] != target
        known[target.key] = target
    assert known == {target.key: target for target in after}
    again = diff(known, after)
    assert not (again.removed or again.added or again.updated)


@given(listings)
def test_one_target_per_address(listing: list[Target]) -> None:
    chosen = one_per_address(listing)
    assert [target.address for target in chosen] == list(dict.fromkeys(target.address for target in listing))
    for target in chosen:
        rivals = [other for other in listing if other.address == target.address]
        free = [other for other in rivals if not other.withheld]
        assert target is (free or rivals)[-1]


# ----------------------------------------------------------------------------------------- objects


def test_a_pod_becomes_a_target_with_role_revision_and_topology() -> None:
    item = pod("decode-0", "10.0.0.1:50051")
    item["metadata"]["labels"] |= {"app.kubernetes.io/component": "decode", "topology.kubernetes.io/zone": "zone-a"}
    item["metadata"]["labels"]["millrace/revision"] = "b"
    (target,) = of_pod(item, PODS)
    assert target == Target(
        key=item["metadata"]["uid"],
        address="10.0.0.1:50051",
        name="decode-0",
        role="decode",
        revision="b",
        topology={"host": "node-1", "zone": "zone-a"},
    )


@pytest.mark.parametrize(
    ("labels", "leader", "found"),
    [
        ({}, PODS.leader, True),
        ({INDEX: "0"}, PODS.leader, True),
        ({INDEX: "1"}, PODS.leader, False),
        ({INDEX: "1"}, "ray.io/node-type=head", True),
        ({"ray.io/node-type": "worker"}, "ray.io/node-type=head", False),
    ],
)
def test_a_pod_that_follows_is_no_target(labels: dict[str, str], leader: str, found: bool) -> None:
    item = pod("worker-0", "10.0.0.1:50051")
    item["metadata"]["labels"] |= labels
    assert bool(of_pod(item, PODS.model_copy(update={"leader": leader}))) is found


@pytest.mark.parametrize(("field", "value"), [("podIP", None), ("phase", "Failed"), ("phase", "Succeeded")])
def test_pods_without_a_future_are_no_targets(field: str, value: str | None) -> None:
    item = pod("worker-0", "10.0.0.1:50051")
    item["status"][field] = value
    assert of_pod(item, PODS) == []


def test_pods_that_are_not_ready_are_withheld() -> None:
    item = pod("worker-0", "10.0.0.1:50051", ready=False)
    assert "not Ready (Scripted)" in of_pod(item, PODS)[0].withheld
    item["status"]["conditions"] = []
    assert "not Ready" in of_pod(item, PODS)[0].withheld
    item = pod("worker-0", "10.0.0.1:50051")
    item["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert "terminating" in of_pod(item, PODS)[0].withheld


def test_ports_and_addresses() -> None:
    item = pod("worker-0", "10.0.0.1:50051")
    assert of_pod(item, PODS.model_copy(update={"port": 7}))[0].address == "10.0.0.1:7"
    assert of_pod(item, PODS.model_copy(update={"port": "other"})) == []
    item["status"]["podIP"] = "fd00::1"
    assert of_pod(item, PODS)[0].address == "[fd00::1]:50051"


def test_a_slice_becomes_a_target_for_each_endpoint() -> None:
    item = endpoint_slice(
        "s", 50051, endpoint("10.0.0.1", "a"), endpoint("10.0.0.2", "b", ready=False), endpoint("10.0.0.3", "c")
    )
    item["endpoints"][2]["conditions"] = {"ready": True, "terminating": True}
    first, second, third = of_slice(item, SLICES)
    item["metadata"]["labels"] = {"millrace/revision": "b"}
    assert {target.revision for target in of_slice(item, SLICES)} == {"b"}
    topology = {"host": "node-1", "zone": "zone-a"}
    assert first == Target("a", "10.0.0.1:50051", "pod-a", topology=topology)
    assert "not ready" in second.withheld and "terminating" in third.withheld
    assert of_slice(item, SLICES.model_copy(update={"port": "other"})) == []
    empty = {**item, "endpoints": None}
    assert of_slice(empty, SLICES) == []


def test_a_pod_in_two_slices_is_one_target() -> None:
    store = Store(SLICES)
    store.replace(
        [endpoint_slice("s", 1, endpoint("10.0.0.1", "a")), endpoint_slice("t", 1, endpoint("10.0.0.1", "a", False))]
    )
    (target,) = store.targets()
    assert not target.withheld


def test_of_two_pods_with_one_address_the_younger_counts() -> None:
    store, old, new = Store(PODS), pod("w", "10.0.0.1:1"), pod("w", "10.0.0.1:1")
    store.replace([new, old])
    assert [target.key for target in store.targets()] == [new["metadata"]["uid"]]
    store.apply("MODIFIED", {**new, "status": {**new["status"], "conditions": []}})
    assert [target.key for target in store.targets()] == [old["metadata"]["uid"]], "the ready one"
    store.apply("DELETED", old)
    assert [target.key for target in store.targets()] == [new["metadata"]["uid"]]


def test_a_list_replaces_what_events_have_said() -> None:
    store, first, second = Store(PODS), pod("a", "10.0.0.1:1"), pod("b", "10.0.0.2:1")
    store.apply("ADDED", first)
    store.apply("BOOKMARK", {"metadata": {"resourceVersion": "7"}})
    assert len(store.targets()) == 1
    odd = {"metadata": {"uid": "odd"}, "status": None}  # no pod, and it hides none behind it
    store.replace([odd, second])
    assert [target.name for target in store.targets()] == ["b"]
    store.apply("DELETED", first)  # an event that came late
    assert [target.name for target in store.targets()] == ["b"]


# ----------------------------------------------------------------------------------------- static


def test_static_targets_are_there_at_once() -> None:
    heard = Heard()
    first = {"address": "a:1", "revision": "r", "topology": {"zone": "z"}}
    StaticSource(RouterConfig(model="m", workers=(first, "b:1")).workers).start(heard)
    assert heard.addresses == ["a:1", "b:1"] and heard.targets[0].topology == {"zone": "z"}
    assert [target.revision for target in heard.targets] == ["r", ""]
