"""What `make images` and `make mirror` print: the images that the chart asks for, from locks that are there."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from millrace_bench.preset import load
from millrace_chart import images, mirror
from millrace_chart.images import ROUTER, WORKERS, Image
from millrace_chart.render import ROOT, objects, template
from millrace_testing.charts import CPU, VARIANTS, of_kind, pods, rendered

REGISTRY = "registry.example/acme"
MIRROR = "registry.example/millrace"  # of renders


def commands(engine: str, device: str, registry: str = REGISTRY) -> list[list[str]]:
    return [shlex.split(line) for line in images.lines(engine, device, registry) if not line.startswith("#")]


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.helm
@pytest.mark.parametrize("device", WORKERS)
def test_what_is_built_and_pushed_is_what_the_install_runs(device: str) -> None:
    *containers, helm = commands("docker", device)
    built = {option(command, "--tag") for command in containers if "build" in command}
    pushed = {command[-1] for command in containers if "push" in command}
    values = (ROOT / option(helm, "--values"),)
    manifests = objects(template(values, (option(helm, "--set"),)))
    asked = {
        container["image"]
        for _, spec in pods(manifests)
        for container in (*spec.get("initContainers", ()), *spec["containers"])
    }
    assert built == pushed == asked
    assert all(name.startswith(f"{REGISTRY}/millrace-") for name in asked)


def test_images_for_cpu_and_gpu_cannot_be_taken_for_each_other() -> None:
    names = [image.reference.split(":") for image in (ROUTER, *WORKERS.values())]
    assert len({name for name, _ in names}) == 3
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert [tag for _, tag in names] == [project, f"{project}-cpu", f"{project}-cuda13"]
    base = re.search(r"FROM nvidia/cuda:(\d+)\.", (ROOT / "services" / "Dockerfile").read_text())
    assert base and WORKERS["gpu"].suffix == f"-cuda{base[1]}"


@pytest.mark.parametrize("engine", images.ENGINES)
def test_build_names_a_dockerfile_that_is_there_and_its_device(engine: str) -> None:
    for device, image in WORKERS.items():
        for command, one in zip(commands(engine, device)[:2], (ROUTER, image), strict=True):
            assert command[0] == engine and (ROOT / option(command, "--file")).is_file()
            assert ("--build-arg" in command) == bool(one.device) and (ROOT / f"requirements/{one.lock}.lock").is_file()
        assert option(command, "--build-arg") == f"DEVICE={device}"


def test_without_a_registry_nothing_is_pushed() -> None:
    printed = commands("docker", "cpu", "")
    assert not any("push" in command or "--set" in command for command in printed)


@pytest.mark.parametrize("image", [WORKERS["cpu"]], ids=lambda image: image.lock)
def test_bill_of_materials_lists_every_package_with_its_hashes(
    image: Image, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As in tests/conftest.py, for the process that checks what it has written: seconds for a format that is not there.
    (tmp_path / "rfc3987_syntax.py").write_text("raise ImportError")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    bom = json.loads(images.write_bom(image, tmp_path).read_text())
    assert bom["bomFormat"] == "CycloneDX" and bom["metadata"]["component"]["version"] == images.version()
    listed = {part["name"]: part for part in bom["components"]}
    pinned = dict(re.findall(r"^([\w.-]+)==([^\s\\]+)", images.packages(image), re.MULTILINE))
    assert {name: part["version"] for name, part in listed.items()} == pinned
    assert ("torch" in listed) == (image.device == "cpu")
    for name, part in listed.items():
        hashes = [one for reference in part["externalReferences"] for one in reference.get("hashes", ())]
        assert hashes or name == "torch", f"{name}: no hash"


def test_make_passes_on_what_it_is_given() -> None:
    line = ["images", "REGISTRY=a/b", "ENGINE=podman", "DEVICE=gpu"]
    done = subprocess.run(["make", "-n", *line], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "--registry 'a/b' --engine podman --device gpu --bom build/sbom" in done.stdout
    subprocess.run(["git", "check-ignore", "-q", "build/sbom"], cwd=ROOT, check=True)


# ---------------------------------------------------------------------------------------------------- mirrors

BUILT = ("millrace-router", "millrace-worker", "millrace-worker-gpu", "worker-efa", "side", "first")
CLIENTS = {"s3": "docker.io/amazon/aws-cli:2.27.50", "oci": "ghcr.io/oras-project/oras:v1.2.3"}


@pytest.mark.helm
@pytest.mark.parametrize(
    ("source", "sets", "image"),
    [
        *((source, ("images.registry=",), name) for source, name in CLIENTS.items()),
        ("s3", (), f"{MIRROR}/amazon/aws-cli:2.27.50"),
        ("oci", ("images.download.repository=ghcr.io/oras-project/oras",), CLIENTS["oci"]),
        (
            "s3",
            ("images.download.repository=reg.local:5000/copies/amazon/aws-cli",),
            "reg.local:5000/copies/amazon/aws-cli:2.27.50",
        ),
        ("s3", ("images.download.repository=amazon/aws-cli", "images.registry="), CLIENTS["s3"]),
        ("s3", ("images.download.repository=acme/s3", "images.download.tag=v1"), f"{MIRROR}/acme/s3:v1"),
        ("hf", (), f"{MIRROR}/millrace-router:0.1.0"),
        ("hf", ("images.download.repository=a.b/hf", "images.download.tag=v1"), "a.b/hf:v1"),
    ],
)
def test_client_that_downloads(source: str, sets: tuple[str, ...], image: str) -> None:
    (job,) = of_kind(rendered(source, *sets), "Job")
    assert job["spec"]["template"]["spec"]["containers"][0]["image"] == image


@pytest.mark.helm
def test_repository_that_names_its_registry_stays_there() -> None:
    items = rendered("cpu-tiny", "images.router.repository=quay.io/acme/router", "images.worker.repository=a/b")
    found = {spec["containers"][0]["image"] for _, spec in pods(items)}
    assert found == {"quay.io/acme/router:0.1.0", f"{MIRROR}/a/b:0.1.0-cpu"}


@pytest.mark.helm
@pytest.mark.parametrize("name", ["cpu-tiny", "h200-1p1d-16gpu", "hf", "s3", "oci", "extended", "aws-efa"])
def test_mirror_has_every_image_that_a_release_pulls(name: str) -> None:
    """Pulled by the names of the copies, and copied from names that say where they are, or that `make images` gives."""
    file, sets = VARIANTS.get(name, (ROOT / f"helm/millrace/presets/{name}.yaml", ()))
    containers = [c for _, spec in pods(rendered(name)) for c in (*spec.get("initContainers", ()), *spec["containers"])]
    pairs = mirror.copies((file,), sets, MIRROR)
    assert {copy for _, copy in pairs} == {container["image"] for container in containers}
    for original, copy in pairs:
        host, _, path = original.partition("/")
        assert original == copy or copy == f"{MIRROR}/{path or original}"
        assert "." in host or original.partition(":")[0] in BUILT, "where it is to be had"


@pytest.mark.helm
def test_what_make_mirror_prints(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["-f", str(CPU), "--manifests", str(ROOT / "k8s/prerequisites/memlock/daemonset.yaml")]
    assert mirror.main(more) == 0
    assert capsys.readouterr().out.split() == [
        "millrace-router:0.1.0",
        "millrace-worker:0.1.0-cpu",
        "docker.io/library/busybox:1.37.0",
        "registry.k8s.io/pause:3.10",
    ]
    assert mirror.main([*more, "--registry", "reg.local/a/"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "millrace-router:0.1.0 reg.local/a/millrace-router:0.1.0"
    assert printed[-1] == "registry.k8s.io/pause:3.10 reg.local/a/pause:3.10"
    assert mirror.main(["--set", "router.replicas=0"]) == 1
    assert "router.replicas: must be at least 1, not 0" in capsys.readouterr().err


def test_compiled_for_are_the_workers_of_the_presets(tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/calls\n')
    engine.chmod(0o755)
    script, image = ROOT / "services" / "compile-into-image.sh", f"{MIRROR}/worker:0.1.0-cuda13"
    subprocess.run(["env", f"COMPILED={tmp_path}/compiled", "sh", script, engine, image, tmp_path], check=True)
    *runs, build = (tmp_path / "calls").read_text().splitlines()
    compiles = f"{tmp_path}/compiled:/var/cache/millrace/0.1.0-cuda13 {image} millrace compile"
    assert all(compiles in call for call in runs) and f"--tag {image} {tmp_path}/compiled" in build
    pools = [pool for file in (ROOT / "k8s" / "golden").glob("h200-*.yaml") for pool in load(file).pools]
    wanted = {frozenset(pool.settings) & {"dp=8", "tp=8"} | {pool.config["goal"]} for pool in pools}
    assert {frozenset(re.findall(r"--set ([dt]p=8) --set goal=(\w+)", call)[0]) for call in runs} == wanted
