"""What a GPU pod gets on each fabric and cloud, and which values of `fabric` are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from millrace_chart.render import CHART, ChartError, Object, fabrics, objects, template
from millrace_testing.charts import CPU, GIVEN, GROUPS, NO_DASHBOARDS, PAIR, PLAIN, VARIANTS, pods, rendered
from millrace_testing.rdma_machine import load_preflight

pytestmark = pytest.mark.helm
DECODE = "Deployment/demo-millrace-decode"
CLOUDS = ("roce", "gke-rdma", "gke-gib", "aks-ib", "aws-efa", "coreweave")


def spec_of(items: list[Object], where: str = DECODE) -> Object:
    (spec,) = (spec for name, spec in pods(items) if name == where)
    return spec


def preflight_of(spec: Object) -> Object:
    (found,) = (container for container in spec["initContainers"] if container["name"] == "preflight")
    return found


def arguments(spec: Object) -> dict[str, str]:
    found = preflight_of(spec)["args"]
    return dict(zip(found, [*found[1:], ""], strict=True))


def variables(container: Object) -> dict[str, str]:
    return {entry["name"]: entry.get("value", "") for entry in container["env"]}


def devices(resources: Object) -> Object:
    """Without what every pod asks for."""
    return {key: value for key, value in resources.items() if key not in ("cpu", "memory", "ephemeral-storage")}


@pytest.mark.parametrize(
    ("name", "resource", "nics", "net"),
    [
        ("h200-1p1d-16gpu", {"rdma/ib": 8}, "8", "IB"),
        ("roce", {"rdma/roce_gdr": 8}, "8", "IB"),
        ("gke-rdma", {}, "8", "IB"),
        ("gke-gib", {}, "8", "gIB"),
        ("aks-ib", {"rdma/ib": 8}, "8", "IB"),
        ("aws-efa", {"vpc.amazonaws.com/efa": 16}, "16", ""),
        ("coreweave", {"rdma/ib": 1}, "8", "IB"),
        ("tcp", {}, None, None),
    ],
)
def test_what_a_pod_asks_for(name: str, resource: Object, nics: str | None, net: str | None) -> None:
    spec = spec_of(rendered(name))
    main, preflight = spec["containers"][0], preflight_of(spec)
    for resources in (main["resources"]["limits"], main["resources"]["requests"], preflight["resources"]["limits"]):
        assert devices(resources) == {"nvidia.com/gpu": "8", **resource}
    told = arguments(spec)
    assert (told.get("--nics"), told.get("--net")) == (nics, net)
    for container in (main, preflight):
        assert ("IPC_LOCK" in container["securityContext"]["capabilities"].get("add", [])) is (nics is not None)
    assert ("podAntiAffinity" in spec.get("affinity", {})) is (name == "aws-efa")
    assert variables(main)["NCCL_SOCKET_IFNAME"] == "eth0"


@pytest.mark.parametrize("name", ["h200-1p1d-16gpu", *CLOUDS])
def test_the_preflight_knows_what_is_set_for_the_worker(name: str) -> None:
    """Or it would overwrite it: NCCL_IB_HCA of coreweave, UCX_TLS of the user."""
    spec = spec_of(rendered(name, "workers.decode.env.UCX_TLS=rc", "workers.decode.envFrom[0].configMapRef.name=nccl"))
    main, preflight = spec["containers"][0], preflight_of(spec)
    assert variables(preflight) == {key: value for key, value in variables(main).items() if not key.startswith("RAY_")}
    assert preflight["envFrom"] == main["envFrom"] == [{"configMapRef": {"name": "nccl"}}]
    assert variables(preflight)["UCX_TLS"] == "rc"
    assert ("NCCL_IB_HCA" in variables(preflight)) is (name == "coreweave")


@pytest.mark.parametrize(("name", "nodes"), [("gke-gib", "hostPath"), ("aks-ib", "configMap"), ("roce", "")])
def test_volumes_of_clouds(name: str, nodes: str) -> None:
    spec = spec_of(rendered(name))
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    known = {"config", "run", "tmp", "shm", "cache", "model", "secret", "tls"}
    added = {key: volume for key, volume in volumes.items() if key not in known}
    assert [kind for volume in added.values() for kind in volume if kind != "name"] == [nodes] * bool(nodes)
    for container in (spec["containers"][0], preflight_of(spec)):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(added) <= set(mounts)
        for value in variables(container).values():  # every path below such a folder is in a folder that is mounted
            for path in value.split(":"):
                if path.startswith(("/usr/local/gib/", "/etc/millrace/nccl/")):
                    assert any(path.startswith(f"{mounts[key]}/") for key in added)


def test_a_pod_waits_for_the_plugin_that_it_mounts() -> None:
    spec = spec_of(rendered("gke-gib"))
    needed = arguments(spec)["--needs"]
    (mount,) = (mount for mount in preflight_of(spec)["volumeMounts"] if mount["name"] == "gib")
    assert needed.startswith(f"{mount['mountPath']}/")
    assert str(Path(needed).parent) in variables(spec["containers"][0])["LD_LIBRARY_PATH"].split(":")
    assert "--needs" not in arguments(spec_of(rendered("gke-rdma")))


def test_a_value_wins_over_its_fabric() -> None:
    more = (
        "fabric.resources.a/b=2",
        "fabric.env.NCCL_SOCKET_IFNAME=net1",
        "fabric.nics=4",
        "fabric.allowTcp=true",
        "fabric.devices[0]=mlx5_bond_",
        "fabric.devices[1]=bnxt_re",
        "fabric.exclude[0]=mlx5_bond_4",
        "fabric.link=InfiniBand",
        "fabric.capabilities[0]=SYS_RESOURCE",
    )
    spec = spec_of(rendered("roce", *more))
    main, told = spec["containers"][0], arguments(spec)
    assert devices(main["resources"]["limits"]) == {"nvidia.com/gpu": "8", "a/b": 2}
    assert variables(main)["NCCL_SOCKET_IFNAME"] == "net1"
    assert main["securityContext"]["capabilities"]["add"] == ["SYS_RESOURCE"]
    assert {
        "--nics": "4",
        "--devices": "mlx5_bond_,bnxt_re",
        "--exclude": "mlx5_bond_4",
        "--link": "InfiniBand",
    }.items() <= (told.items())
    assert "--allow-tcp" in told


def test_a_node_has_interfaces_of_other_names() -> None:
    """gloo ends a rank that is told of an interface which does not exist."""
    spec = spec_of(rendered("coreweave", "workerDefaults.hostNetwork=true"))
    for container in (spec["containers"][0], preflight_of(spec)):
        assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & set(variables(container))
        assert variables(container)["NCCL_IB_HCA"] == "ibp"
    own = spec_of(rendered("coreweave", "workerDefaults.hostNetwork=true", "fabric.env.GLOO_SOCKET_IFNAME=ens3"))
    assert variables(own["containers"][0])["GLOO_SOCKET_IFNAME"] == "ens3"


def test_no_capabilities_at_all(tmp_path: Path) -> None:
    """An empty list is not null, which leaves the preset's."""
    values = tmp_path / "values.yaml"
    values.write_text("fabric: {capabilities: []}\n")
    file, sets = VARIANTS["roce"]
    spec = spec_of(objects(template((file, values), (NO_DASHBOARDS, *sets))))
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("name", CLOUDS)
def test_the_preflight_takes_the_arguments(name: str) -> None:
    options = load_preflight().parse(preflight_of(spec_of(rendered(name)))["args"])
    assert options.nics and all(options.devices) and not options.exclude
    assert options.env == Path("/run/millrace/fabric.env")


def test_nodes_with_the_right_gpu() -> None:
    """Any of the labels of NVIDIA and of the clouds; another GPU of the same resource is not taken."""
    spec = spec_of(rendered("roce"))
    rule = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    labels = {term["matchExpressions"][0]["key"]: term["matchExpressions"] for term in rule["nodeSelectorTerms"]}
    assert labels["nvidia.com/gpu.product"] == [
        {"key": "nvidia.com/gpu.product", "operator": "In", "values": ["NVIDIA-H200"]}
    ]
    assert "p5en.48xlarge" in labels["node.kubernetes.io/instance-type"][0]["values"]
    assert all(len(expressions) == 1 for expressions in labels.values()), "one label is enough"
    assert "nodeAffinity" not in spec_of(rendered("roce", "workerDefaults.gpuModel=")).get("affinity", {})


GPUS = yaml.safe_load((CHART / "files" / "gpus.yaml").read_text())
PARTS = ("", "-MIG-1g.18gb", "-MIG-1g.10gb.me", "-SHARED", "-MIG-1g.18gb-SHARED")


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("gpu", GPUS)
def test_nodes_with_a_part_of_the_right_gpu(gpu: str, part: str) -> None:
    """GPU feature discovery appends the part to the product; the clouds' labels name the whole GPU."""
    spec = spec_of(rendered("roce", f"workerDefaults.gpuModel={gpu}{part}"))
    rule = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    terms = {it["key"]: it["values"] for term in rule["nodeSelectorTerms"] for it in term["matchExpressions"]}
    known = GPUS[gpu]["nodes"]
    assert terms["nvidia.com/gpu.product"] == [f"{product}{part}" for product in known["nvidia.com/gpu.product"]]
    assert (terms.keys() == known.keys()) is (not part or len(known) == 1)


@pytest.mark.parametrize(
    ("resource", "keys"),
    [
        ("nvidia.com/gpu", ["nvidia.com/gpu"]),
        ("nvidia.com/mig-1g.18gb", ["nvidia.com/gpu", "nvidia.com/mig-1g.18gb"]),
        ("nvidia.com/gpu.shared", ["nvidia.com/gpu", "nvidia.com/gpu.shared"]),
    ],
)
def test_parts_of_gpus_are_on_nodes_with_the_taint_of_gpus(resource: str, keys: list[str]) -> None:
    spec = spec_of(rendered("h200-1p1d-16gpu", f"workerDefaults.gpuResource={resource}"))
    assert [entry["key"] for entry in spec["tolerations"]] == keys
    assert spec["containers"][0]["resources"]["limits"][resource] == "8"


def test_gpus_of_the_list() -> None:
    seen: set[tuple[str, str]] = set()
    for gpu in GPUS.values():
        labels = gpu["nodes"]
        assert "nvidia.com/gpu.product" in labels, "the label that every cluster can have"
        pairs = {(key, value) for key, values in labels.items() for value in values}
        assert not seen & pairs, "a node has one GPU model"
        seen |= pairs


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("h200-1p1d-16gpu", ["nvidia.com/gpu"]),
        ("gke-rdma", ["nvidia.com/gpu"]),
        ("aks-ib", ["nvidia.com/gpu", "sku"]),
        ("aws-efa", ["nvidia.com/gpu", "aws.amazon.com/efa"]),
        ("coreweave", ["nvidia.com/gpu"]),
    ],
)
def test_taints_of_gpu_nodes(name: str, keys: list[str]) -> None:
    items = rendered(name, "workers.decode.scheduling.tolerations[0].key=mine")
    for where, own in ((DECODE, ["mine"]), ("Deployment/demo-millrace-prefill", [])):
        tolerations = spec_of(items, where)["tolerations"]
        assert [entry["key"] for entry in tolerations] == [*keys, *own]
        assert all(entry["effect"] == "NoSchedule" for entry in tolerations[: len(keys)])
    assert "tolerations" not in spec_of(items, "Deployment/demo-millrace-router")


def test_pods_on_cpu_know_nothing_of_it() -> None:
    spec = spec_of(rendered("cpu-tiny", "fabric.preset=aks-ib", "workerDefaults.gpuModel=H200"))
    assert "tolerations" not in spec and "nodeAffinity" not in spec.get("affinity", {})
    assert "--nics" not in arguments(spec) and "NCCL_TOPO_FILE" not in variables(spec["containers"][0])


@pytest.mark.parametrize("name", [*fabrics()])
def test_every_fabric_has_a_variant_in_these_tests(name: str) -> None:
    assert any(f"fabric.preset={name}" in sets for _, sets in VARIANTS.values()) or name == "ib"


def test_old_helm_renders_the_same() -> None:
    for name in ("gke-gib", "aks-ib", "aws-efa"):
        file, sets = VARIANTS[name]
        try:
            assert template((file,), (*sets, GIVEN, PLAIN)) == template((file,), (*sets, GIVEN, PLAIN), "oldest")
        except ChartError as error:
            if "there is no oldest" not in str(error):
                raise
            pytest.skip(str(error))


@pytest.mark.parametrize(
    ("file", "sets", "message"),
    [
        (PAIR, ("fabric.preset=",), "fabric.preset: required, workers.decode moves data between GPU pods"),
        (PAIR, ("fabric.preset=tcp-dev",), "fabric.allowTcp: must be true with fabric.preset=tcp-dev"),
        (PAIR, ("fabric.privileged=true",), "fabric.acknowledgePrivileged: must be true"),
        (
            GROUPS,
            ("fabric.preset=aws-efa", "images.gpuWorker.repository=efa"),
            "size: must be 1 with fabric.preset=aws-efa",
        ),
        (
            PAIR,
            ("fabric.preset=aws-efa",),
            "images.gpuWorker.repository: fabric.preset=aws-efa needs an image of yours",
        ),
        (
            PAIR,
            ("fabric.preset=gke-rdma", "workers.decode.gpus=4", "workers.decode.dp=4"),
            "workers.decode.gpus: must be 8 with fabric.preset=gke-rdma",
        ),
        (
            PAIR,
            ("workers.decode.gpuModel=A100",),
            'workers.decode.gpuModel: "A100" is none of B200, H100, H20, H200, H800',
        ),
        (PAIR, ("workers.decode.gpuModel=H200-MIG-small",), '"H200-MIG-small" is none of'),
        (CPU, ("fabric.link=Infiniband",), "schema"),
        (CPU, ("fabric.devices[0]=mlx5_*",), "schema"),
        (CPU, ("fabric.capabilities[0]=ipc_lock",), "schema"),
    ],
)
def test_what_cannot_work_is_refused(file: Path, sets: tuple[str, ...], message: str) -> None:
    with pytest.raises(ChartError) as caught:
        template((file,), sets)
    assert message in str(caught.value)


def test_other_networks_of_gke_need_other_gpus() -> None:
    sets = ("fabric.preset=gke-rdma", "workerDefaults.gpus=4", "workerDefaults.dp=4")
    assert template((PAIR,), (*sets, r"fabric.annotations.networking\.gke\.io/interfaces=[]"))
