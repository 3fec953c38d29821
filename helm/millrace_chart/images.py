"""`make images`: print the commands that build, push and install the images, and list the packages of the images.

No command is run. Names and versions come from the chart: repositories from values.yaml, the version from appVersion.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import yaml

from millrace_chart.render import CHART, ROOT, values

REQUIREMENTS = ROOT / "requirements"
ENGINES = {"docker": ("docker", "build"), "podman": ("podman", "build", "--format", "docker")}  # OCI has no HEALTHCHECK
PRESETS = {"cpu": "cpu-tiny", "gpu": "h200-8gpu-unified"}  # what the printed helm command installs


@dataclass(frozen=True, slots=True)
class Image:
    key: str  # in the values: images.KEY
    dockerfile: str
    lock: str  # requirements/LOCK.lock
    device: str = ""  # build argument
    suffix: str = ""  # of the tag

    @property
    def reference(self) -> str:
        """Repository and tag, without a registry."""
        return f"{values()['images'][self.key]['repository']}:{version()}{self.suffix}"

    def build(self, engine: str, registry: str) -> list[str]:
        device = ["--build-arg", f"DEVICE={self.device}"] if self.device else []
        name = [*ENGINES[engine], "--platform", "linux/amd64", "--file", self.dockerfile, *device]
        return [*name, "--tag", _join(registry, self.reference), "."]


ROUTER = Image("router", "router/Dockerfile", "router")
WORKERS = {
    "cpu": Image("worker", "services/Dockerfile", "worker-cpu", "cpu", "-cpu"),
    "gpu": Image("gpuWorker", "services/Dockerfile", "worker-gpu", "gpu", "-cuda13"),
}


@cache
def version() -> str:
    return str(yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"])


def _join(registry: str, reference: str) -> str:
    return f"{registry.rstrip('/')}/{reference}" if registry else reference


def install(device: str, registry: str) -> list[str]:
    """Return the helm command that installs a preset with these images."""
    preset = f"{CHART.relative_to(ROOT)}/presets/{PRESETS[device]}.yaml"
    sets = ["--set", f"images.registry={registry.rstrip('/')}"] if registry else []
    return ["helm", "install", "millrace", str(CHART.relative_to(ROOT)), "--values", preset, *sets]


def lines(engine: str, device: str, registry: str) -> Iterator[str]:
    """Yield commands, and comments that a shell skips."""
    images = (ROUTER, WORKERS[device])
    yield "# In the root of the source tree:"
    yield from (shlex.join(image.build(engine, registry)) for image in images)
    script = f"sh services/compile-into-image.sh {engine} {_join(registry, images[1].reference)} DIR"
    yield from [f"# With the kernels of the presets, on a node with 8 GPUs: {script}"] if device == "gpu" else []
    if registry:
        yield from (shlex.join([engine, "push", _join(registry, image.reference)]) for image in images)
        yield f"# model.source s3 and oci need a client there too: `make mirror REGISTRY={registry}` lists all images"
    else:
        yield "# Without REGISTRY=... there is nothing to push; the nodes must get the images in another way."
    yield "# Install; presets for other clusters are beside this one:"
    yield shlex.join(install(device, registry))


def packages(image: Image) -> str:
    """Return a requirements file of all Python packages of the image. torch for CPU is apart: see the Dockerfile."""
    locks = (image.lock, "torch-cpu") if image.device == "cpu" else (image.lock,)
    return "".join((REQUIREMENTS / f"{name}.lock").read_text() for name in locks)


def write_bom(image: Image, folder: Path) -> Path:
    """List the image's Python packages as CycloneDX JSON. Raises CalledProcessError for a broken lock."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{image.reference.replace(':', '-')}.cdx.json"
    quiet = ["-W", "ignore:The Component this BOM:UserWarning"]  # locks do not name the users of a package
    tool = [sys.executable, *quiet, "-m", "cyclonedx_py", "requirements", "--pyproject", str(ROOT / "pyproject.toml")]
    command = [*tool, "--output-reproducible", "--output-file", str(path), "-"]
    subprocess.run(command, input=packages(image), text=True, check=True)
    return path


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="make images", description=__doc__)
    parser.add_argument("--registry", default="", help="registry and path, as in ghcr.io/acme")
    parser.add_argument("--engine", choices=ENGINES, default="docker")
    parser.add_argument("--device", choices=WORKERS, default="cpu", help="device of the worker image")
    parser.add_argument("--bom", type=Path, help="folder for bills of materials")
    args = parser.parse_args(arguments)
    text = [*lines(args.engine, args.device, args.registry)]
    for image in (ROUTER, WORKERS[args.device]) if args.bom else ():
        text.append(f"# Python packages of {image.reference}: {write_bom(image, args.bom)}")
    sys.stdout.write("\n".join(text) + "\n")


if __name__ == "__main__":
    main()
