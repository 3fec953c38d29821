"""Make the schemas of `router.config` and `workers.*.config` from the configuration models of router and worker.

The schemas leave out the keys that the chart sets itself, so each key has one place. No key is required: the chart or
the defaults of the model fill it in.
"""

from collections.abc import Iterable
from typing import Any

from millrace_common.config import RENAMED, Config
from millrace_router.config import RouterConfig
from millrace_serve.worker.config import WorkerConfig

Schema = dict[str, Any]
OWNED = {  # set by templates/_config.tpl
    "routerConfig": (
        "model",
        "workers",
        "discovery",
        "grpc",
        "http",
        "admin",
        "admin_http",
        "metrics",
        "health",
        "tls",
        "public_tls",
        "api_keys",
        "api_keys_plaintext",
        "secret",
        "tracing",
        "log_level",
    ),
    "workerConfig": (
        "role",
        "host",
        "grpc_port",
        "metrics_port",
        "health_port",
        "worker_id",
        "model",
        "served_name",
        "dp",
        "tp",
        "device",
        "cache_dir",
        "launcher",
        "secret",
        "tls",
        "tracing",
        "log_level",
    ),
}
MODELS: dict[str, type[Config]] = {"routerConfig": RouterConfig, "workerConfig": WorkerConfig}
OWNED_BELOW = {"timeouts": ("drain",)}
DROPPED = ("title", "default", "description", "required")  # no key is required; the models have the comments
WORDS = ("graphs",)  # YAML's on and off


def config_schemas() -> dict[str, Schema]:
    return {name: config_schema(model, OWNED[name]) for name, model in MODELS.items()}


def config_schema(model: type[Config], owned: Iterable[str]) -> Schema:
    whole = model.model_json_schema()
    definitions = whole.pop("$defs", {})
    schema: Schema = plain(whole, definitions)
    for key in owned:
        del schema["properties"][key]  # a KeyError: the model no longer has it
    for section, owned_keys in OWNED_BELOW.items():
        for key in owned_keys:
            del schema["properties"][section]["properties"][key]
    for (section, old), new in RENAMED.items():
        keys = schema["properties"].get(section, {}).get("properties", {}) if section else schema["properties"]
        if new in keys:
            keys[old] = keys[new]
    for word in WORDS:
        if word in schema["properties"]:
            schema["properties"][word] = {"anyOf": [schema["properties"][word], {"type": "boolean"}]}
    return schema


def plain(node: Any, definitions: Schema) -> Any:
    """Return the schema as draft 7, which Helm reads: references are filled in, and descriptions are left out."""
    if isinstance(node, list):
        return [plain(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        target = definitions[node["$ref"].rpartition("/")[2]]
        return plain({**target, **{key: value for key, value in node.items() if key != "$ref"}}, definitions)
    result = {}
    for key, value in node.items():
        if key == "properties":  # here the keys are names, which may be any of DROPPED
            result[key] = {name: plain(schema, definitions) for name, schema in value.items()}
        elif key not in DROPPED:
            result[key] = plain(value, definitions)
    return result
