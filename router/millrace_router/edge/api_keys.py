"""Tenants: the API keys of a file, and the rights of each.

The file is a mounted secret, YAML or JSON (docs/router.md has an example), looked at again while we run; changed keys
hold from the next request on.

Only hashes are kept. A key is looked up by its hash, so the time of a look-up reveals nothing about existing keys.
Without a file every caller is the tenant "default", without limits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Set
from pathlib import Path
from typing import Any

import yaml
from millrace_common.config import Config
from millrace_common.reasons import Reason
from millrace_common.reloaded import Reloaded
from millrace_rpc.errors import MillraceError
from pydantic import Field, ValidationError, model_validator

from millrace_router.flow.tenant import Bucket, Tenant

LEAST_KEY_CHARS = 8
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
BURST_S = 2.0  # seconds of a rate that its burst is, unless it is given


class ApiKey(Config):
    name: str = Field(pattern=NAME)  # a tenant may have several keys
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")  # hex; made from `key` where the file has that
    weight: float = Field(1.0, gt=0, le=1000)
    priority: int = Field(0, ge=-100, le=100)
    requests_per_s: float | None = Field(None, gt=0)
    requests_burst: float | None = Field(None, ge=1)
    tokens_per_s: float | None = Field(None, gt=0)
    tokens_burst: float | None = Field(None, ge=1)
    cache_group: str | None = Field(None, pattern=NAME)  # tenants of one group share cached pages; none: alone

    @model_validator(mode="before")
    @classmethod
    def _hash(cls, values: Any) -> Any:
        if not isinstance(values, dict) or "key" not in values:
            return values
        key = values["key"]
        if "sha256" in values or not isinstance(key, str) or len(key) < LEAST_KEY_CHARS:
            raise ValueError(f"key: give either sha256 or key, a text of at least {LEAST_KEY_CHARS} characters")
        return {name: value for name, value in values.items() if name != "key"} | {"sha256": _sha256(key)}


class KeyFile(Config):
    keys: tuple[ApiKey, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _distinct(self) -> KeyFile:
        if len({key.sha256 for key in self.keys}) < len(self.keys):
            raise ValueError("keys: two have the same sha256")
        if len({key.name for key in self.keys}) < len({key.model_copy(update={"sha256": ""}) for key in self.keys}):
            raise ValueError("keys: two of the same name differ in more than the key")
        return self


class Keys:
    """The tenants of a file. Raises OSError when the file is unusable at the start."""

    def __init__(self, path: Path, clock: Callable[[], float], on_reload: Callable[[str], None]) -> None:
        self._clock = clock
        self._tenants: dict[str, Tenant] = {}  # by name
        try:
            self._file = Reloaded("API keys", [path], lambda: self._load(path), on_reload, clock)
        except ValueError as error:
            raise OSError(f"api_keys: {error}") from error

    def tenant(self, authorization: str) -> Tenant:
        """Return the tenant of the key in an Authorization header. Raises UNAUTHENTICATED for an unknown key."""
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise MillraceError(
                Reason.UNAUTHENTICATED, "give an API key: Authorization: Bearer <key>, or x-api-key: <key>"
            )
        tenant = self._file.get().get(_sha256(key.strip()))
        if tenant is None:
            raise MillraceError(Reason.UNAUTHENTICATED, "this API key is not known")
        return tenant

    @property
    def names(self) -> Set[str]:
        """The names of the present tenants."""
        return {tenant.name for tenant in self._file.get().values()}

    def _load(self, path: Path) -> Mapping[str, Tenant]:
        """By the hash of the key."""
        keys, now = read(path), self._clock()
        self._tenants = {key.name: _tenant(key, self._tenants.get(key.name), now) for key in keys}
        return {key.sha256: self._tenants[key.name] for key in keys}


def read(path: Path) -> tuple[ApiKey, ...]:
    """Raises ValueError or OSError with the place of the mistake, never with a value of the file."""
    try:
        values = yaml.safe_load(path.read_text())
    except (UnicodeDecodeError, yaml.YAMLError):
        raise ValueError(f"{path} is not YAML") from None
    try:
        return KeyFile.model_validate(values).keys
    except ValidationError as error:
        places = (
            f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors(include_input=False)
        )
        raise ValueError(f"{path}: {'; '.join(places)}") from None


def _tenant(key: ApiKey, before: Tenant | None, now: float) -> Tenant:
    """When the file changes, the rest of a rate is kept, and running requests are counted in the same bucket."""
    requests = _bucket(key.requests_per_s, key.requests_burst, before.requests if before else None, now)
    tokens = _bucket(key.tokens_per_s, key.tokens_burst, before.tokens if before else None, now)
    group = f"tenant {key.name}" if key.cache_group is None else f"group {key.cache_group}"
    return Tenant(key.name, key.weight, key.priority, requests, tokens, group)


def _bucket(rate: float | None, burst: float | None, before: Bucket | None, now: float) -> Bucket | None:
    if rate is None:
        return None
    size = burst or max(BURST_S * rate, 1.0)
    if before is None:
        return Bucket(rate, size, now)
    before.resize(rate, size, now)
    return before


def _sha256(key: str) -> str:
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()
