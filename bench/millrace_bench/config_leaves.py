"""Print every key that an operator can set in a configuration file, and how many there are.

Nested models are followed to their leaves. A model that is used in two places (TLS, tracing) is counted in each of
them, because each is a key of its own. A checkpoint's config.json is no configuration of ours.
"""

import typing
from collections.abc import Iterator
from typing import Any

from millrace_router.config import RouterConfig
from millrace_router.http.api_keys import KeyFile
from millrace_serve.worker.config import WorkerConfig
from pydantic import BaseModel

FILES: dict[str, type[BaseModel]] = {"router": RouterConfig, "worker": WorkerConfig, "API keys": KeyFile}


def leaves(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Dotted names of the keys of `model` that hold no further model."""
    for name, field in model.model_fields.items():
        inner = list(_models(field.annotation))
        for nested in inner:
            yield from leaves(nested, f"{prefix}{name}.")
        if not inner:
            yield prefix + name


def count() -> dict[str, int]:
    return {file: len(list(leaves(model))) for file, model in FILES.items()}


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models within an annotation such as `Tls | None` or `tuple[ApiKey, ...]`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models(argument)


def main() -> None:
    for file, model in FILES.items():
        print(f"{file}:", *leaves(model), sep="\n  ")
    counts = count()
    print(*(f"{file} {number}" for file, number in counts.items()), f"total {sum(counts.values())}", sep=", ")


if __name__ == "__main__":
    main()
