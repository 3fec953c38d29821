"""What `make images` prints and writes: the images that the chart asks for, from locks that are there."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
from millrace_chart import images
from millrace_chart.images import ROUTER, WORKERS, Image
from millrace_chart.render import ROOT, objects, template
from millrace_testing.charts import pods

REGISTRY = "registry.example/acme"


def commands(engine: str, device: str, registry: str = REGISTRY) -> list[list[str]]:
    return [shlex.split(line) for line in images.lines(engine, device, registry) if not line.startswith("#")]


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


@pytest.mark.helm
@pytest.mark.parametrize("device", WORKERS)
@pytest.mark.parametrize("engine", images.ENGINES)
def test_what_is_built_and_pushed_is_what_the_printed_install_runs(engine: str, device: str) -> None:
    *containers, helm = commands(engine, device)
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
def test_a_build_names_a_dockerfile_that_is_there_and_its_device(engine: str) -> None:
    for device, image in WORKERS.items():
        for command, one in zip(commands(engine, device)[:2], (ROUTER, image), strict=True):
            assert command[0] == engine and (ROOT / option(command, "--file")).is_file()
            assert ("--build-arg" in command) == bool(one.device) and (ROOT / f"requirements/{one.lock}.lock").is_file()
        assert option(command, "--build-arg") == f"DEVICE={device}"


def test_without_a_registry_nothing_is_pushed() -> None:
    printed = commands("docker", "cpu", "")
    assert not any("push" in command or "--set" in command for command in printed)


@pytest.mark.parametrize("image", [ROUTER, WORKERS["cpu"]], ids=lambda image: image.lock)
def test_a_bill_of_materials_lists_every_package_with_its_hashes(
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
