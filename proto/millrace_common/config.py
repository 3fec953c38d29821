"""Configuration: frozen models, one per component, from a YAML file and `--set a.b=c`. An unknown key is an error."""

import difflib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic_core import CoreSchema

from millrace_common.json_values import JsonObject

log = logging.getLogger(__name__)
NO_YAML = (yaml.YAMLError, ValueError, RecursionError)  # the others: bytes, dates and numbers that are none, deep lists
MOST = 1 << 24  # pages, tokens and requests: counts have 32 bits in messages, and two are added
LONGEST_S = (2**31 - 1) // 1000  # 24 days: polls and timers of the operating system count milliseconds in 31 bits

# (section, old key) → new key. The old ones hold for one release.
RENAMED = {
    ("limits", "share_prompts"): "context_parallel_tokens",
    ("limits", "max_parked_pages"): "max_held_pages",
    ("", "spare_experts"): "redundant_experts",
}


class ConfigError(Exception):
    """A configuration that cannot be used; the message names every offending key."""


class OverCommitted(ValueError):
    """The configuration needs more memory than there is. The message has the numbers and the keys to change."""


class Config(BaseModel, frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, str_max_length=MOST):
    """A section. Only with a limit of their length are texts with half of a character refused."""


class OrAuto:
    """Of a key that may be `auto` in a worker's configuration, which puts a value in its place (plan/settings.py)."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> JsonObject:
        schema = handler(core)
        return {**schema, "type": [schema["type"], "string"], "pattern": "^auto$"}


C = TypeVar("C", bound=Config)
Count = Annotated[int, Field(le=MOST)]
Seconds = Annotated[float, Field(ge=0, le=LONGEST_S)]
Level = Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]
LogLevel = Annotated[Level, BeforeValidator(lambda level: str(level).upper())]


def _port(address: str) -> str:
    if (port := address.rpartition(":")[2]).isdecimal() and int(port) >= 1 << 16:
        raise ValueError("must have a port of at most 65535")
    return address


PORT = AfterValidator(_port)  # of an address: sockets would take 65,536 for 0, or end the process


def load(model: type[C], path: str | Path | None = None, overrides: Sequence[str] = ()) -> C:
    """Read `model` from a YAML file (if any), then apply overrides of the form `a.b=value` (value is YAML)."""
    values: JsonObject = {}
    if path is not None:
        try:
            values = yaml.safe_load(Path(path).read_text()) or {}
        except (OSError, *NO_YAML) as error:
            raise ConfigError(f"cannot read configuration {path}: {' '.join(str(error).split())}") from error
        if not isinstance(values, dict):
            raise ConfigError(f"configuration {path} must be a mapping, not {type(values).__name__}")
    for item in overrides:
        override(values, item)
    _rename(values)
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError(_explain(error, model)) from error


def _rename(values: JsonObject) -> None:
    """Put new keys in the place of old ones. Raises ConfigError."""
    for (part, old), new in RENAMED.items():
        section = values.get(part) if part else values
        if isinstance(section, dict) and old in section:
            if new in section:
                raise ConfigError(f"{old} is the old name of {new}: remove {old}")
            log.warning("%s is deprecated and goes with the next release: set %s", old, new)
            section[new] = section.pop(old)


def override(values: JsonObject, item: str) -> None:
    """Apply one `a.b=value` in place. Raises ConfigError."""
    key, sep, raw = item.partition("=")
    if not sep or not key:
        raise ConfigError(f"--set {item!r} is not of the form key.path=value")
    *parents, leaf = key.split(".")
    for parent in parents:
        if values.get(parent) is None:  # absent, or a key without a value in the file
            values[parent] = {}
        values = values[parent]
        if not isinstance(values, dict):
            raise ConfigError(f"--set {item!r}: {parent!r} is not a section")
    try:
        values[leaf] = yaml.safe_load(raw)
    except NO_YAML as error:
        raise ConfigError(f"--set {item!r}: the value is not YAML: {' '.join(str(error).split())}") from error


def _explain(error: ValidationError, model: type[Config]) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            lines.append(f"{key}: unknown key{_nearest(problem['loc'], model)}")
        elif problem["type"] == "missing":
            lines.append(f"{key}: required, for example with --set {key}=VALUE")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            lines.append(f"{key}: {message} (got {problem['input']!r})" if key else message)
    return "; ".join(lines)


def _nearest(path: tuple[int | str, ...], model: type[Config]) -> str:
    """The end of the message about an unknown key: the key of the same section that is spelled most like it."""
    names: list[str] = list(model.model_fields)
    for part in path[:-1]:
        field = model.model_fields.get(str(part))
        section = field.annotation if field is not None else None
        if not (isinstance(section, type) and issubclass(section, Config)):
            return ""
        model, names = section, list(section.model_fields)
    found = difflib.get_close_matches(str(path[-1]), names, 1)
    return f"; did you mean {'.'.join([*map(str, path[:-1]), found[0]])}?" if found else ""
