"""What a GPU pod gets on each fabric and cloud."""

from pathlib import Path

import pytest
import yaml
from millrace_chart.render import CHART, Object, fabrics, objects, template
from millrace_testing.charts import NO_DASHBOARDS, VARIANTS, rendered, spec_of
from millrace_testing.rdma_machine import load_preflight

pytestmark = pytest.mark.helm
PAIR = "h200-1p1d-16gpu"
CLOUDS = {  # variant: resources besides GPUs, NICs, NCCL_NET, taints besides NVIDIA's
    PAIR: ({"rdma/ib": 8}, "8", "IB", []),
    "roce": ({"rdma/roce_gdr": 8}, "8", "IB", []),
    "gke-rdma": ({}, "8", "IB", []),
    "gke-gib": ({}, "8", "gIB", []),
    "aks-ib": ({"rdma/ib": 8}, "8", "IB", ["sku"]),
    "aws-efa": ({"vpc.amazonaws.com/efa": 16}, "16", "", ["aws.amazon.com/efa"]),
    "coreweave": ({"rdma/ib": 1}, "8", "IB", []),
    "tcp": ({}, None, None, []),
}
MORE = ("env.UCX_TLS=rc", "envFrom[0].configMapRef.name=nccl", "scheduling.tolerations[0].key=mine")
GPUS = yaml.safe_load((CHART / "files" / "gpus.yaml").read_text())
PARTS = ("", "-MIG-1g.18gb", "-MIG-1g.10gb.me", "-SHARED", "-MIG-1g.18gb-SHARED")


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


@pytest.mark.parametrize("name", CLOUDS)
def test_pod_of_a_fabric_has_its_devices_variables_and_taints(name: str) -> None:
    """And the preflight knows what is set for the worker, or it would overwrite it."""
    resource, nics, net, taints = CLOUDS[name]
    items = rendered(name, *(f"workers.decode.{item}" for item in MORE))
    spec, other = spec_of(items), spec_of(items, "Deployment/demo-millrace-prefill")
    main, preflight, told = spec["containers"][0], preflight_of(spec), arguments(spec)
    for resources in (main["resources"]["limits"], main["resources"]["requests"], preflight["resources"]["limits"]):
        assert devices(resources) == {"nvidia.com/gpu": "8", **resource}
    assert (told.get("--nics"), told.get("--net")) == (nics, net)
    for container in (main, preflight):
        assert ("IPC_LOCK" in container["securityContext"]["capabilities"].get("add", [])) is (nics is not None)
    apart = spec.get("affinity", {}).get("podAntiAffinity", {}).get("requiredDuringSchedulingIgnoredDuringExecution")
    others = [term["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] for term in apart or ()]
    assert others == ["prefill"] * (name == "aws-efa"), "a decode pod beside no prefill pod"
    assert variables(main)["NCCL_SOCKET_IFNAME"] == "eth0"
    assert variables(preflight) == {key: value for key, value in variables(main).items() if not key.startswith("RAY_")}
    assert preflight["envFrom"] == main["envFrom"] == [{"configMapRef": {"name": "nccl"}}]
    assert variables(preflight)["UCX_TLS"] == "rc" and ("NCCL_IB_HCA" in variables(main)) is (name == "coreweave")
    keys = ["nvidia.com/gpu", *taints]
    assert [entry["key"] for entry in spec["tolerations"]] == [*keys, "mine"]
    assert [(entry["key"], entry["effect"]) for entry in other["tolerations"]] == [(key, "NoSchedule") for key in keys]
    assert "tolerations" not in spec_of(items, "Deployment/demo-millrace-router")
    options = load_preflight().parse(preflight["args"])
    assert not options.exclude and (not nics or (all(options.devices) and str(options.nics) == nics))
    assert options.env == (Path("/run/millrace/fabric.env") if nics else None)


@pytest.mark.parametrize(("name", "kind"), [("gke-gib", "hostPath"), ("aks-ib", "configMap"), ("roce", "")])
def test_folder_of_a_cloud_is_mounted_where_variables_look(name: str, kind: str) -> None:
    spec = spec_of(rendered(name))
    known = {"config", "run", "tmp", "shm", "cache", "model", "secret", "tls"}
    added = {volume["name"]: volume for volume in spec["volumes"] if volume["name"] not in known}
    assert [key for volume in added.values() for key in volume if key != "name"] == [kind] * bool(kind)
    for container in (spec["containers"][0], preflight_of(spec)):
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert set(added) <= set(mounts)
        for path in ":".join(variables(container).values()).split(":"):
            if path.startswith(("/usr/local/gib/", "/etc/millrace/nccl/")):
                assert any(path.startswith(f"{mounts[key]}/") for key in added)
    needed = arguments(spec).get("--needs", "")
    assert bool(needed) is (kind == "hostPath"), "a pod waits for the plugin that it mounts"
    if needed:
        libraries = variables(spec["containers"][0])["LD_LIBRARY_PATH"].split(":")
        assert str(Path(needed).parent) in libraries and needed.startswith("/usr/local/gib/")


def test_value_of_the_user_wins_over_its_fabric() -> None:
    told = {"nics": "4", "link": "InfiniBand", "devices": "mlx5_bond_,bnxt_re", "exclude": "mlx5_bond_4"}
    lists = ("devices={mlx5_bond_,bnxt_re}", "exclude={mlx5_bond_4}", "capabilities={SYS_RESOURCE}")
    more = ("resources.a/b=2", "env.NCCL_SOCKET_IFNAME=net1", "nics=4", "allowTcp=true", "link=InfiniBand", *lists)
    spec = spec_of(rendered("roce", *(f"fabric.{item}" for item in more)))
    main = spec["containers"][0]
    assert devices(main["resources"]["limits"]) == {"nvidia.com/gpu": "8", "a/b": 2}
    assert variables(main)["NCCL_SOCKET_IFNAME"] == "net1"
    assert main["securityContext"]["capabilities"]["add"] == ["SYS_RESOURCE"]
    assert {f"--{key}": value for key, value in told.items()}.items() <= arguments(spec).items()
    assert "--allow-tcp" in arguments(spec)


def test_network_of_the_node_has_interfaces_of_other_names() -> None:
    """gloo ends a rank that is told of an interface which does not exist."""
    spec = spec_of(rendered("coreweave", "workerDefaults.hostNetwork=true"))
    for container in (spec["containers"][0], preflight_of(spec)):
        assert not {"NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"} & set(variables(container))
        assert variables(container)["NCCL_IB_HCA"] == "ibp"
    own = spec_of(rendered("coreweave", "workerDefaults.hostNetwork=true", "fabric.env.GLOO_SOCKET_IFNAME=ens3"))
    assert variables(own["containers"][0])["GLOO_SOCKET_IFNAME"] == "ens3"


def test_empty_list_of_capabilities_leaves_none(tmp_path: Path) -> None:
    """It is not null, which leaves the preset's."""
    values = tmp_path / "values.yaml"
    values.write_text("fabric: {capabilities: []}\n")
    file, sets = VARIANTS["roce"]
    spec = spec_of(objects(template((file, values), (NO_DASHBOARDS, *sets))))
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def terms(model: str) -> list[Object]:
    spec = spec_of(rendered("roce", f"workerDefaults.gpuModel={model}"))
    return spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]


@pytest.mark.parametrize(("gpu", "part"), [*(("H200", part) for part in PARTS), *((gpu, "") for gpu in GPUS)])
def test_gpu_model_chooses_nodes_by_any_label_of_it(gpu: str, part: str) -> None:
    """GPU feature discovery appends the part to the product; the clouds' labels name the whole GPU."""
    assert all(len(term["matchExpressions"]) == 1 for term in terms(gpu + part)), "one label is enough"
    (*rules,) = (expression for term in terms(gpu + part) for expression in term["matchExpressions"])
    found, known = {rule["key"]: rule["values"] for rule in rules}, GPUS[gpu]["nodes"]
    assert {rule["operator"] for rule in rules} == {"In"}
    assert found["nvidia.com/gpu.product"] == [f"{product}{part}" for product in known["nvidia.com/gpu.product"]]
    assert (found == known) is (not part)


def test_pod_of_no_gpu_model_or_on_cpu_chooses_no_nodes() -> None:
    assert "nodeAffinity" not in spec_of(rendered("roce", "workerDefaults.gpuModel=")).get("affinity", {})
    spec = spec_of(rendered("cpu-tiny", "fabric.preset=aks-ib", "workerDefaults.gpuModel=H200"))
    assert "tolerations" not in spec and "nodeAffinity" not in spec.get("affinity", {})
    assert "--nics" not in arguments(spec) and "NCCL_TOPO_FILE" not in variables(spec["containers"][0])


@pytest.mark.parametrize("resource", ["nvidia.com/mig-1g.18gb", "nvidia.com/gpu.shared"])
def test_part_of_a_gpu_tolerates_the_taint_of_gpus(resource: str) -> None:
    spec = spec_of(rendered(PAIR, f"workerDefaults.gpuResource={resource}"))
    assert [entry["key"] for entry in spec["tolerations"]] == ["nvidia.com/gpu", resource]
    assert spec["containers"][0]["resources"]["limits"][resource] == "8"


def test_gpus_of_the_list_have_labels_of_their_own() -> None:
    pairs = [(key, value) for gpu in GPUS.values() for key, values in gpu["nodes"].items() for value in values]
    assert len(pairs) == len(set(pairs)), "a node has one GPU model"
    assert all("nvidia.com/gpu.product" in gpu["nodes"] for gpu in GPUS.values())


def test_fabric_has_a_variant_in_these_tests() -> None:
    tried = {item.partition("=")[2] for _, sets in VARIANTS.values() for item in sets if "fabric.preset" in item}
    assert tried | {"ib"} >= {*fabrics()}
