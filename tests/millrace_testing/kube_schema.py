"""Checks an object as an API server does before it stores it. `check` is the one door.

Built-in kinds are checked by the schemas that Kubernetes publishes (from kubernetes-validate), custom resources by the
CRDs in tests/helm/crds, or by the published ones that the folder $MILLRACE_CRDS has. All go the same way: the schema
with unknown fields refused, then lists with keys and CEL rules (kube_rules.py), then names (kube_names.py).
"""

import json
import os
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator

from millrace_testing import kube_names, kube_rules

Object = dict[str, Any]
Schema = dict[str, Any]
VERSION = "1.37"
OURS = Path(__file__).parents[1] / "helm" / "crds"
META = "io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"
INT32, INT64 = 2**31, 2**63
AS_IT_IS = (
    *("type", "enum", "pattern", "required", "minLength", "maxLength", "minimum", "maximum", "minItems", "maxItems"),
    *("minProperties", "maxProperties", "uniqueItems", "multipleOf", "$ref"),
)


class UnknownKind(Exception):
    """No schema is known for an object's apiVersion and kind."""


def check(item: Object, old: Object | None = None) -> list[str]:
    """What an API server would say against the object, nothing if it takes it. `old`: what the object replaces."""
    kind = (item.get("apiVersion", ""), item.get("kind", ""))
    schema = schemas().get(kind)
    if schema is None:
        raise UnknownKind(f"no schema of {kind[1]} of {kind[0]}")
    errors = _validator(kind).iter_errors(item)
    found = [f"{'.'.join(map(str, error.absolute_path)) or 'the object'}: {error.message}" for error in errors]
    if found:
        return found  # rules may rely on the types
    new, before = (kube_rules.defaulted(schema, each, definitions()) if each else None for each in (item, old))
    webhook = {"x-kubernetes-validations": kube_rules.WEBHOOKS.get(kind, [])}
    return [
        *kube_rules.problems(schema, new, before, definitions()),
        *kube_rules.problems(webhook, new, before, definitions()),
        *kube_names.problems(item),
    ]


def folder() -> Path:
    """Where CRDs are that count before ours: $MILLRACE_CRDS, or tests/helm/crds."""
    return Path(os.environ.get("MILLRACE_CRDS") or OURS)


@cache
def definitions() -> dict[str, Schema]:
    name = f"kubernetes-json-schema/v{VERSION}.0-local-strict/_definitions.json"
    return json.loads(files("kubernetes_validate").joinpath(name).read_text())["$defs"]


@cache
def schemas() -> dict[tuple[str, str], Schema]:
    """(apiVersion, kind): structural schema, of built-in kinds and of the CRDs."""
    found = {**dict(custom(OURS)), **dict(custom(folder()))}
    for name, schema in definitions().items():
        for made in schema.get("x-kubernetes-group-version-kind", ()):
            version = f"{made['group']}/{made['version']}" if made["group"] else made["version"]
            found.setdefault((version, made["kind"]), {"$ref": f"#/$defs/{name}"})
    return found


def crds(where: Path) -> Iterator[Object]:
    """The CRDs in a folder; a file may be a list, as kubectl gives it."""
    for path in sorted(where.glob("*.yaml")):
        for document in yaml.load_all(path.read_text(), getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            for item in (document or {}).get("items", [document]):
                if item and item.get("kind") == "CustomResourceDefinition":
                    yield item


def custom(where: Path) -> Iterator[tuple[tuple[str, str], Schema]]:
    """The schemas of every version of the CRDs in a folder."""
    for crd in crds(where):
        for version in crd["spec"]["versions"]:
            kind = (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"])
            yield kind, version["schema"]["openAPIV3Schema"]


@cache
def _validator(kind: tuple[str, str]) -> Draft202012Validator:
    schema = schemas()[kind]
    if "$ref" not in schema:
        schema = strict(schema)
        schema["properties"] |= {"apiVersion": {}, "kind": {}, "metadata": {"$ref": f"#/$defs/{META}"}}
    return Draft202012Validator({**schema, "$defs": definitions()})


def strict(node: Schema) -> Schema:
    """A structural schema as a JSON schema that refuses what an API server would prune."""
    made = {key: node[key] for key in AS_IT_IS if key in node}
    if "pattern" in made and "(?i)" in made["pattern"]:  # Go takes the flag anywhere, Python only in front
        made["pattern"] = "(?i)" + made["pattern"].replace("(?i)", "")
    for limit, format_ in ((INT32, "int32"), (INT64, "int64")):
        if node.get("format") == format_:
            made = {"minimum": -limit, "maximum": limit - 1, **made}
    if "items" in node:
        made["items"] = strict(node["items"])
    if node.get("type") == "object" and not node.get("x-kubernetes-preserve-unknown-fields"):
        made["properties"] = {name: strict(child) for name, child in node.get("properties", {}).items()}
        more = node.get("additionalProperties", False)
        made["additionalProperties"] = strict(more) if isinstance(more, dict) else more
    if node.get("x-kubernetes-int-or-string"):
        made["type"] = ["integer", "string"]
    if node.get("nullable"):
        made["type"] = [*([made["type"]] if isinstance(made["type"], str) else made["type"]), "null"]
    for key in ("allOf", "anyOf", "oneOf", "not"):  # value checks only: a structural schema has no fields there
        if key in node:
            made[key] = node[key]
    return made
