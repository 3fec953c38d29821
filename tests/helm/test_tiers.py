"""The tiers of a worker's KV: memory of its pods, and a volume."""

import pytest
from millrace_chart.render import Object
from millrace_testing.charts import pods, rendered

pytestmark = pytest.mark.helm


def decode(preset: str, *more: str) -> Object:
    """The spec of the only decode pods."""
    (spec,) = (spec for name, spec in pods(rendered(preset, *more)) if name.endswith("-decode"))
    return spec


def memory(spec: Object) -> tuple[str, str]:
    resources = spec["containers"][0]["resources"]
    return resources["requests"]["memory"], resources["limits"]["memory"]


@pytest.mark.parametrize(
    ("dp", "tp", "gib", "given", "wanted"),
    [
        (1, 1, "0", ("1Gi", "2Gi"), ("1Gi", "2Gi")),
        (1, 1, "3", ("1Gi", "2Gi"), ("4096Mi", "5120Mi")),
        (4, 1, "2", ("1Gi", "2148M"), ("9216Mi", "10241Mi")),  # 2148 MB are 2048.5 MiB
        (2, 4, "2", ("1Gi", "2Gi"), ("5120Mi", "6144Mi")),
        (1, 1, "auto", ("1Gi", "2Gi"), ("1Gi", "2Gi")),
    ],
)
def test_host_tiers_of_all_replicas_are_beside_the_memory_for_everything_else(
    dp: int, tp: int, gib: str, given: tuple[str, str], wanted: tuple[str, str]
) -> None:
    amounts = zip(("requests", "limits"), given, strict=True)
    sets = [f"dp={dp}", f"tp={tp}", f"config.limits.host_cache_gib={gib}"]
    sets += [f"resources.{name}.memory={amount}" for name, amount in amounts]
    assert memory(decode("cpu-tiny", *(f"workers.decode.{item}" for item in sets))) == wanted


def test_pod_of_a_group_has_the_host_tiers_of_its_own_replicas() -> None:
    sets = ("kind=lws", "size=2", "dp=4", "config.limits.host_cache_gib=1", "resources.limits.memory=4Gi")
    items = rendered("cpu-tiny", *(f"workers.decode.{item}" for item in sets))
    specs = [spec for name, spec in pods(items) if "decode" in name]
    assert specs
    assert {memory(spec)[1] for spec in specs} == {"6144Mi"}


@pytest.mark.parametrize(
    ("sets", "volume"),
    [
        (("kind=emptyDir", "size=3Gi"), {"emptyDir": {"sizeLimit": "3Gi"}}),
        (("kind=pvc", "claim=shared"), {"persistentVolumeClaim": {"claimName": "shared"}}),
        (("kind=hostPath", "hostPath=/mnt/kv"), {"hostPath": {"path": "/mnt/kv", "type": "DirectoryOrCreate"}}),
    ],
)
def test_disk_tier_has_a_volume_at_its_folder(sets: tuple[str, ...], volume: Object) -> None:
    limits = ("config.limits.disk_cache=/kv", "config.limits.host_cache_gib=1")
    more = (*limits, *(f"diskCache.{item}" for item in sets))
    spec = decode("cpu-tiny", *(f"workers.decode.{item}" for item in more))
    assert {"name": "disk-cache", **volume} in spec["volumes"]
    mount = {"name": "disk-cache", "mountPath": "/kv"}
    assert mount in spec["containers"][0]["volumeMounts"]
    owners = [item for item in spec["initContainers"] if item["name"] == "disk-cache-owner"]
    assert [(item["command"][2], item["volumeMounts"]) for item in owners] == (
        [("/kv", [mount])] if "kind=hostPath" in sets else []
    )


def test_own_volume_above_the_folder_will_do() -> None:
    more = ("config.limits.disk_cache=/data/kv", "config.limits.host_cache_gib=1")
    mounts = ("extraVolumes[0].name=data", "extraVolumeMounts[0].name=data", "extraVolumeMounts[0].mountPath=/data")
    spec = decode("cpu-tiny", *(f"workers.decode.{item}" for item in (*more, *mounts)))
    assert "disk-cache" not in {volume["name"] for volume in spec["volumes"]}
